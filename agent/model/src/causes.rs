//! An error and its causes: to search them, and to show them to people.

use std::error::Error;

/// The error and its causes, outermost first.
pub fn causes<'a>(error: &'a (dyn Error + 'static)) -> impl Iterator<Item = &'a (dyn Error + 'static)> {
    std::iter::successors(Some(error), |error: &&'a (dyn Error + 'static)| (*error).source())
}

/// All of them as one text, without repetition.
pub fn tell(error: &(dyn Error + 'static)) -> String {
    let mut text = String::new();
    for cause in causes(error) {
        let cause = cause.to_string();
        if !text.contains(&cause) {
            if !text.is_empty() {
                text.push_str(": ");
            }
            text.push_str(&cause);
        }
    }
    text
}

#[cfg(test)]
mod tests {
    use std::io;

    use super::*;

    #[derive(Debug, thiserror::Error)]
    #[error("{0}")]
    struct Outer(&'static str, #[source] io::Error);

    #[test]
    fn test_nothing_is_said_twice() {
        let inner = || io::Error::other("inner");
        assert_eq!(tell(&Outer("outer", inner())), "outer: inner");
        assert_eq!(tell(&Outer("outer, because of the inner", inner())), "outer, because of the inner");
        assert_eq!(causes(&Outer("outer", inner())).count(), 2);
    }
}
