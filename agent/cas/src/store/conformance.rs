//! The contract of every store. Each implementation runs this; it panics at the first violation.

#![allow(clippy::unwrap_used, reason = "this is a test that other crates run too")]

use agent_model::Digest;
use bytes::Bytes;
use futures_util::stream::{self, StreamExt, TryStreamExt};

use super::{BlobStore, Chunks, ReadError, WriteError};
use crate::digest_of;

/// Bytes that differ for each `seed`.
pub fn content(seed: u64, length: usize) -> Bytes {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let mut bytes = Vec::with_capacity(length + 8);
    while bytes.len() < length {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        bytes.extend(state.to_le_bytes());
    }
    bytes.truncate(length);
    bytes.into()
}

/// `bytes` in pieces of `piece` bytes.
pub fn source(bytes: &Bytes, piece: usize) -> Chunks {
    let pieces: Vec<_> = bytes.chunks(piece).map(|part| Ok(Bytes::copy_from_slice(part))).collect();
    stream::iter(pieces).boxed()
}

/// Everything [`BlobStore::read`] yields.
pub async fn read_all(store: &impl BlobStore, digest: Digest, offset: u64) -> Result<Bytes, ReadError> {
    let parts: Vec<Bytes> = store.read(digest, offset).await?.try_collect().await?;
    Ok(parts.concat().into())
}

/// Runs the suite on a store that holds none of its blobs.
pub async fn check(store: &impl BlobStore) {
    empty_blob(store).await;
    streams(store).await;
    wrong_streams(store).await;
    batches(store).await;
    many_missing(store).await;
}

async fn empty_blob(store: &impl BlobStore) {
    assert_eq!(store.missing(&[Digest::EMPTY]).await.unwrap(), [], "the empty blob is always there");
    assert_eq!(read_all(store, Digest::EMPTY, 0).await.unwrap(), "");
    assert_eq!(store.read_batch(vec![Digest::EMPTY]).await.remove(0).unwrap(), "");
    store.write(Digest::EMPTY, stream::empty().boxed()).await.unwrap();
    let forged = Digest { hash: [7; 32], size: 0 };
    assert_eq!(store.missing(&[forged]).await.unwrap(), [forged], "only the empty hash is empty");
}

async fn streams(store: &impl BlobStore) {
    let bytes = content(1, 5 * 1024 * 1024 + 17);
    let digest = digest_of(&bytes);
    assert!(matches!(read_all(store, digest, 0).await, Err(ReadError::Absent { .. })));
    for piece in [100_003, 8 * 1024 * 1024] {
        store.write(digest, source(&bytes, piece)).await.expect("a write of the same blob is no error");
    }
    assert_eq!(store.missing(&[digest]).await.unwrap(), []);
    for offset in [0, 1, bytes.len() - 1, bytes.len()] {
        assert_eq!(read_all(store, digest, offset as u64).await.unwrap(), bytes.slice(offset..));
    }
    let beyond = read_all(store, digest, digest.size + 1).await;
    assert!(matches!(beyond, Err(ReadError::Offset { .. })));
    let resized = Digest { size: digest.size - 1, ..digest };
    assert_eq!(store.missing(&[resized]).await.unwrap(), [resized], "hash and size must both match");
    assert!(matches!(read_all(store, resized, 0).await, Err(ReadError::Absent { .. })));
}

async fn wrong_streams(store: &impl BlobStore) {
    let bytes = content(2, 300_000);
    let digest = digest_of(&bytes);
    let mut flipped = bytes.to_vec();
    flipped[299_999] ^= 1;
    let longer = [&bytes[..], b"x"].concat();
    for wrong in [Bytes::from(flipped), longer.into(), bytes.slice(..299_999), Bytes::new()] {
        let result = store.write(digest, source(&wrong, 65_536)).await;
        assert!(matches!(result, Err(WriteError::Mismatch { .. })), "{} bytes: {result:?}", wrong.len());
    }
    let broken = stream::iter([Ok(bytes.slice(..1000)), Err(ReadError::Absent { digest })]);
    let result = store.write(digest, broken.boxed()).await;
    assert!(matches!(result, Err(WriteError::Source { .. })), "{result:?}");
    assert_eq!(store.missing(&[digest]).await.unwrap(), [digest], "nothing of a wrong blob stays");
}

async fn batches(store: &impl BlobStore) {
    // Together far more than one message carries, one of them alone more than that.
    let sizes = (0..60).map(|i| i * 1000).chain([5_000_000, 2_000_000, 2_000_000]);
    let blobs: Vec<(Digest, Bytes)> = sizes
        .enumerate()
        .map(|(i, size)| content(100 + i as u64, size))
        .map(|bytes| (digest_of(&bytes), bytes))
        .collect();
    let (other, absent) = (content(3, 50), digest_of(b"absent"));
    let mut given = blobs.clone();
    given.insert(7, (digest_of(b"something else"), other));
    for (index, result) in store.write_batch(given).await.into_iter().enumerate() {
        match index {
            7 => assert!(matches!(result, Err(WriteError::Mismatch { .. })), "{result:?}"),
            _ => result.expect("one wrong blob does not harm the others"),
        }
    }
    let mut asked: Vec<Digest> = blobs.iter().map(|(digest, _)| *digest).collect();
    assert_eq!(store.missing(&asked).await.unwrap(), []);
    asked.insert(3, absent);
    let mut answers = store.read_batch(asked).await;
    assert!(matches!(answers.remove(3), Err(ReadError::Absent { digest }) if digest == absent));
    for ((_, bytes), answer) in blobs.iter().zip(answers) {
        assert_eq!(answer.unwrap(), bytes);
    }
    assert!(store.read_batch(Vec::new()).await.is_empty());
    assert!(store.write_batch(Vec::new()).await.is_empty());
}

async fn many_missing(store: &impl BlobStore) {
    let asked: Vec<Digest> = (0..25_000u32).map(|i| digest_of(&i.to_le_bytes())).collect();
    let kept = Bytes::copy_from_slice(&12_345u32.to_le_bytes());
    store.write_batch(vec![(asked[12_345], kept)]).await.remove(0).unwrap();
    let mut twice = asked.clone();
    twice.extend(&asked);
    let mut expected = asked;
    expected.remove(12_345);
    assert!(store.missing(&twice).await.unwrap() == expected, "each once, in the order asked");
}
