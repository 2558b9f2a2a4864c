//! Records that prove themselves: a JSON object with the checksum of all that stands before it.
//!
//! ```text
//! {"sealed":true,  …the fields of the record…  ,"sum":"32 digits"}
//! ```
//!
//! Either of the two marks alone says that there must be a sound checksum, so no damage in one place passes a record off
//! as one of the release before, which had neither. For that release both are fields that it does not know.

use serde::Serialize;
use sha2::{Digest as _, Sha256};

/// How a sealed record begins.
const BEGINNING: &[u8] = br#"{"sealed":true,"#;
/// What stands before the checksum, and behind it.
const SUM: &[u8] = br#","sum":""#;
const END: &[u8] = br#""}"#;
/// Bytes of the checksum that are kept, two digits each.
const KEPT: usize = 16;

/// The text of a record, which is an object with at least one field.
pub fn seal(record: &impl Serialize) -> serde_json::Result<Vec<u8>> {
    let text = serde_json::to_vec(record)?;
    let fields = text.strip_prefix(b"{").and_then(|text| text.strip_suffix(b"}")).unwrap_or(&text);
    let body = [BEGINNING, fields].concat();
    Ok([&body, SUM, sum(&body).as_bytes(), END].concat())
}

/// Whether the text of a record is as it was written, or of the release before, whose records prove nothing.
pub fn is_sound(text: &[u8]) -> bool {
    let tail = SUM.len() + 2 * KEPT + END.len();
    let parts = text.len().checked_sub(tail).and_then(|at| text.split_at_checked(at));
    let parts = parts.filter(|(_, tail)| tail.starts_with(SUM));
    match (text.starts_with(BEGINNING), parts) {
        (false, None) => true,
        (true, Some((body, tail))) => tail == [SUM, sum(body).as_bytes(), END].concat(),
        _ => false,
    }
}

fn sum(body: &[u8]) -> String {
    agent_model::ids::hex(&Sha256::digest(body)[..KEPT])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn test_every_damage_of_one_place_is_found() {
        let record = serde_json::json!({"version": 2, "instance": "i", "code": 0});
        let sealed = seal(&record).unwrap();
        assert!(is_sound(&sealed));
        let read: serde_json::Value = serde_json::from_slice(&sealed).unwrap();
        assert_eq!(
            (&read["code"], &read["sealed"]),
            (&record["code"], &true.into()),
            "older readers understand it"
        );
        for at in 0..sealed.len() {
            for bit in 0..8 {
                let mut flipped = sealed.clone();
                flipped[at] ^= 1 << bit;
                assert!(!is_sound(&flipped), "byte {at}, bit {bit}");
            }
            assert!(
                at == 0
                    || !is_sound(&sealed[..at])
                    || serde_json::from_slice::<serde_json::Value>(&sealed[..at]).is_err()
            );
        }
        assert!(!is_sound(&[&sealed[..], b"\n"].concat()));
    }

    #[test]
    fn test_records_of_the_release_before_prove_nothing_and_are_read() {
        assert!(is_sound(br#"{"version":1,"instance":"i"}"#) && is_sound(b"{}"));
    }
}
