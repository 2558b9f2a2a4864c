//! The one hash function of the product: SHA-256, with the processor's own instructions where it has them.

use agent_model::Digest;
use sha2::{Digest as _, Sha256};

/// The digest of bytes at hand.
pub fn digest_of(bytes: &[u8]) -> Digest {
    Digest { hash: Sha256::digest(bytes).into(), size: bytes.len() as u64 }
}

/// A digest that grows with the bytes.
#[derive(Debug, Clone, Default)]
pub struct Hasher {
    state: Sha256,
    size: u64,
}

impl Hasher {
    /// A hasher that has seen nothing.
    pub fn new() -> Hasher {
        Hasher::default()
    }

    /// Adds the bytes that follow.
    pub fn update(&mut self, bytes: &[u8]) {
        self.state.update(bytes);
        self.size += bytes.len() as u64;
    }

    /// Bytes seen so far.
    pub fn size(&self) -> u64 {
        self.size
    }

    /// The digest of everything seen.
    pub fn finish(self) -> Digest {
        Digest { hash: self.state.finalize().into(), size: self.size }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn test_digest_of_nothing_is_the_empty_digest() {
        assert_eq!(digest_of(b""), Digest::EMPTY);
        assert_eq!(Hasher::new().finish(), Digest::EMPTY);
    }

    #[test]
    fn test_hasher_agrees_with_digest_of_for_any_split() {
        let data: Vec<u8> = (0..1000u32).map(|i| i as u8).collect();
        for cut in [0, 1, 63, 64, 65, 999, 1000] {
            let mut hasher = Hasher::new();
            hasher.update(&data[..cut]);
            hasher.update(&data[cut..]);
            assert_eq!(hasher.finish(), digest_of(&data));
        }
    }
}
