//! Explicit lists: the exact packages of an environment.
//!
//! Owns the text form: `# platform: ...`, `@EXPLICIT`, one `URL#sha256:HEX` a line (an MD5 alone is read too).
//! Hides hexadecimal digits.
//!
//! Invariants: a written list is read back as the same packages; written lists are sorted, so that one environment
//! has one text; no line contains credentials.

use std::fmt::Write;

use url::Url;

/// A package of a list.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct ListedPackage {
    /// Its URL, without a fragment.
    pub(crate) url: Url,
    /// SHA-256 of the archive.
    pub(crate) sha256: Option<[u8; 32]>,
    /// MD5 of the archive, in lists that have no SHA-256.
    pub(crate) md5: Option<[u8; 16]>,
    /// Its line number, from 1.
    pub(crate) line: usize,
}

/// A list.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub(crate) struct List {
    /// The platform it was made for.
    pub(crate) platform: Option<String>,
    /// Its packages.
    pub(crate) entries: Vec<ListedPackage>,
}

/// An error in a list.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("line {line} of the lock: {what}")]
pub(crate) struct Unreadable {
    line: usize,
    what: String,
}

/// Reads a list.
pub(crate) fn parse(text: &str) -> Result<List, Unreadable> {
    let mut list = List::default();
    for (index, raw) in text.lines().enumerate() {
        let (line, text) = (index + 1, raw.trim());
        let wrong = |what: String| Unreadable { line, what };
        if let Some(comment) = text.strip_prefix('#') {
            if let Some(platform) = comment.trim().strip_prefix("platform:") {
                list.platform = Some(platform.trim().to_owned());
            }
            continue;
        }
        if text.is_empty() || text == "@EXPLICIT" {
            continue;
        }
        let mut url = Url::parse(text).map_err(|error| wrong(format!("`{text}` is not a URL: {error}")))?;
        if !url.username().is_empty() || url.password().is_some() || url.path().starts_with("/t/") {
            return Err(wrong(
                "a URL holds credentials; they belong into the node's credentials file".into(),
            ));
        }
        let (sha256, md5) = match url.fragment().unwrap_or_default() {
            "" => (None, None),
            digest => digests(digest).ok_or_else(|| wrong(format!("`{digest}` is no SHA-256 and no MD5")))?,
        };
        url.set_fragment(None);
        list.entries.push(ListedPackage { url, sha256, md5, line });
    }
    Ok(list)
}

/// SHA-256 and MD5, one of which is there.
type Digests = (Option<[u8; 32]>, Option<[u8; 16]>);

fn digests(text: &str) -> Option<Digests> {
    let digits = text.rsplit([':', '=']).next()?;
    match digits.len() {
        64 => Some((Some(unhex(digits)?), None)),
        32 => Some((None, Some(unhex(digits)?))),
        _ => None,
    }
}

/// Writes a list; the same packages always give the same text.
pub(crate) fn print(platform: &str, packages: &[(Url, Option<Vec<u8>>)]) -> String {
    let mut lines: Vec<String> = packages
        .iter()
        .map(|(url, sha256)| match sha256 {
            Some(sha256) => format!("{url}#sha256:{}", hex(sha256)),
            None => url.to_string(),
        })
        .collect();
    // By file name first, because people look for a package by it.
    lines.sort_by(|a, b| (a.rsplit('/').next(), a).cmp(&(b.rsplit('/').next(), b)));
    let mut text = format!("# platform: {platform}\n@EXPLICIT\n");
    for line in lines {
        text.push_str(&line);
        text.push('\n');
    }
    text
}

/// Lower-case digits.
pub(crate) fn hex(bytes: &[u8]) -> String {
    bytes.iter().fold(String::new(), |mut text, byte| {
        let _ = write!(text, "{byte:02x}");
        text
    })
}

fn unhex<const N: usize>(digits: &str) -> Option<[u8; N]> {
    let mut bytes = [0; N];
    for (byte, pair) in bytes.iter_mut().zip(digits.as_bytes().chunks(2)) {
        *byte = u8::from_str_radix(std::str::from_utf8(pair).ok()?, 16).ok()?;
    }
    Some(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn test_a_written_list_is_read_back_and_written_alike() {
        let packages = vec![
            (Url::parse("https://h.example/c/noarch/zip-1-0.conda").unwrap(), Some(vec![7; 32])),
            (Url::parse("https://h.example/c/linux-64/abc-1-0.tar.bz2").unwrap(), Some(vec![255; 32])),
        ];
        let text = print("linux-64", &packages);
        let list = parse(&text).unwrap();
        assert_eq!(list.platform.as_deref(), Some("linux-64"));
        assert_eq!(list.entries[0].url.path(), "/c/linux-64/abc-1-0.tar.bz2");
        assert_eq!(list.entries[1].sha256, Some([7; 32]));
        let again: Vec<_> =
            list.entries.iter().map(|e| (e.url.clone(), e.sha256.map(|d| d.to_vec()))).collect();
        assert_eq!(print("linux-64", &again), text);
    }

    #[test]
    fn test_the_forms_of_a_digest() {
        let both = "https://h.example/a-1-0.conda";
        let md5 = "0123456789abcdef0123456789ABCDEF";
        let list = parse(&format!(
            "# made by hand\n@EXPLICIT\n{both}#{md5}\n{both}#sha256={}\n{both}\n",
            "ab".repeat(32)
        ))
        .unwrap();
        assert_eq!(list.entries[0].md5.map(|d| hex(&d)), Some(md5.to_lowercase()));
        assert_eq!(list.entries[1].sha256, Some([0xab; 32]));
        assert_eq!((list.entries[2].sha256, list.entries[2].md5), (None, None));
    }

    #[test]
    fn test_what_cannot_be_read_is_named_by_its_line() {
        for (text, what) in [
            ("@EXPLICIT\nnumpy-1.0-0.conda\n", "is not a URL"),
            ("@EXPLICIT\nhttps://u:p@h.example/a-1-0.conda\n", "credentials"),
            ("@EXPLICIT\nhttps://h.example/t/abc/c/noarch/a-1-0.conda\n", "credentials"),
            ("@EXPLICIT\nhttps://h.example/a-1-0.conda#abc\n", "no SHA-256"),
        ] {
            let error = parse(text).unwrap_err().to_string();
            assert!(error.contains(what) && error.starts_with("line 2 of the lock"), "{error}");
        }
    }
}
