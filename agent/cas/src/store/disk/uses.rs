//! When blobs were used last, across restarts.
//!
//! Owns the file `uses`: for each blob the first eight bytes of its hash and the second of its last use, in the
//! order of the hashes, and the SHA-256 of all that. It is written when the store is closed, and at most once
//! an hour with a listing. It is never flushed: without it a blob counts as used when its file or its segment
//! was written last, which only makes a poorer choice of what is removed first.

use std::io::{self, Read};

use agent_model::Digest;
use parking_lot::Mutex;

use super::home::{Home, sealed, unsealed};
use super::index::Index;

const NAME: &str = "uses";
const ENTRY: usize = 12;

/// Loads the last uses from the file into the index.
pub(super) fn recall(home: &Home, index: &Mutex<Index>) {
    let mut bytes = Vec::new();
    let read =
        home.open_file(NAME).map_err(io::Error::from).and_then(|mut file| file.read_to_end(&mut bytes));
    let entries = read.ok().and_then(|_| unsealed(&bytes));
    if let Some(entries) = entries.filter(|entries| entries.len().is_multiple_of(ENTRY)) {
        index.lock().remember(|digest| find(entries, digest));
    }
}

fn find(entries: &[u8], digest: &Digest) -> Option<u32> {
    let entry = |at: usize| &entries[at * ENTRY..(at + 1) * ENTRY];
    let (mut low, mut high) = (0, entries.len() / ENTRY);
    while low < high {
        let middle = low + (high - low) / 2;
        match entry(middle)[..8].cmp(&digest.hash[..8]) {
            std::cmp::Ordering::Less => low = middle + 1,
            std::cmp::Ordering::Equal => return entry(middle)[8..].try_into().map(u32::from_le_bytes).ok(),
            std::cmp::Ordering::Greater => high = middle,
        }
    }
    None
}

/// Writes the last uses of the index to the file.
pub(super) fn note(home: &Home, index: &Mutex<Index>) {
    let mut entries: Vec<[u8; ENTRY]> = Vec::new();
    for (digest, used) in index.lock().uses() {
        let mut entry = [0; ENTRY];
        entry[..8].copy_from_slice(&digest.hash[..8]);
        entry[8..].copy_from_slice(&used.to_le_bytes());
        entries.push(entry);
    }
    entries.sort_unstable();
    let bytes = sealed(entries.as_flattened().to_vec());
    if let Err(error) = home.replace_file(NAME, &bytes, "cas.uses.write") {
        tracing::warn!(%error, "cannot note last use of blobs");
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::digest_of;

    #[test]
    fn test_uses_are_found_by_hash_and_no_others() {
        let mut digests: Vec<Digest> = (0..100u32).map(|n| digest_of(&n.to_le_bytes())).collect();
        digests.sort_unstable();
        for count in [0, 1, 2, 99] {
            let mut entries = Vec::new();
            for (n, digest) in digests[..count].iter().enumerate() {
                entries.extend(&digest.hash[..8]);
                entries.extend((n as u32).to_le_bytes());
            }
            for (n, digest) in digests.iter().enumerate() {
                assert_eq!(find(&entries, digest), (n < count).then_some(n as u32));
            }
        }
    }
}
