//! What an answer says beside its message while the controller cannot write: how old the picture is that it shows.

use agent_model::Timestamp;
use tonic::metadata::MetadataMap;

/// Since when the controller cannot write to its database, and why.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Unwritten {
    /// Answers show what was on disk then.
    pub since: Timestamp,
    /// In words, after "the controller cannot write its database".
    pub why: String,
}

impl Unwritten {
    /// The name of the header.
    pub const HEADER: &str = "agentd-unwritten";

    /// The value of the header.
    pub fn to_header(&self) -> String {
        format!("{} {}", self.since.0, self.why)
    }

    /// What an answer says, if it says that.
    pub fn of(metadata: &MetadataMap) -> Option<Unwritten> {
        let (since, why) = metadata.get(Unwritten::HEADER)?.to_str().ok()?.split_once(' ')?;
        Some(Unwritten { since: Timestamp(since.parse().ok()?), why: why.to_owned() })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn test_an_answer_says_how_old_its_picture_is() {
        let said = Unwritten { since: Timestamp(1_700_000_000_123), why: "its disk is full".to_owned() };
        let mut metadata = MetadataMap::new();
        assert_eq!(Unwritten::of(&metadata), None);
        metadata.insert(Unwritten::HEADER, said.to_header().parse().unwrap());
        assert_eq!(Unwritten::of(&metadata), Some(said));
        metadata.insert(Unwritten::HEADER, "soon".parse().unwrap());
        assert_eq!(Unwritten::of(&metadata), None, "nothing is made up from what another program says");
    }
}
