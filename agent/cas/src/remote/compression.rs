//! Blobs compressed with zstd, as the protocol allows.
//!
//! Hides the library, its level and its windows, and when compression pays. The input is untrusted: sizes that it
//! declares are ignored. At most the bytes that the digest names are decompressed, and one more that reveals a
//! longer blob; a window is at most [`WINDOW`]; the compressed form may be a little longer than the blob and no
//! more. Several frames in sequence are one blob; a frame without an end, or anything after the last one that is
//! no frame, is an error.

use std::io::{self, Write};

use agent_blocking::blocking;
use agent_model::Digest;
use bytes::{Buf, Bytes};
use futures_util::stream::{self, StreamExt};
use zstd::bulk::Compressor;
use zstd::stream::raw::{DParameter, Decoder, InBuffer, Operation, OutBuffer};
use zstd::stream::write::Encoder;

use crate::store::{CHUNK, Chunks, ReadError};

/// Higher ones cost more time and gain a few per cent.
const LEVEL: i32 = 1;

/// The largest window a frame may ask for, as a power of two: 8 MiB.
const WINDOW: u32 = 23;

/// How much of a blob is compressed on trial before the whole is, in bytes.
const PROBE: usize = 64 * 1024;

/// Smaller blobs, in bytes, are not compressed: the message around them is larger.
const LEAST: usize = 256;

/// By how many bytes, beyond a 64th of the blob's size, its compressed form may be larger than the blob.
const SLACK: u64 = 1024 * 1024;

/// Why a compressed form is not that of the blob.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs, reason = "the messages say it")]
pub enum InflateError {
    #[error("the compressed bytes are damaged, or need too large a window")]
    Broken(#[source] io::Error),
    #[error("the compressed bytes hold more than {size} bytes")]
    TooLong { size: u64 },
    #[error("the compressed bytes of {size} bytes do not end")]
    Endless { size: u64 },
    #[error("the compressed bytes end within a frame")]
    Truncated,
}

/// Decompresses a blob, piece by piece.
pub struct Inflater {
    decoder: Decoder<'static>,
    size: u64,
    /// Bytes that may still come out.
    left: u64,
    /// Bytes that may still go in.
    allowed: u64,
    /// A frame has begun and not ended.
    within: bool,
    /// The last piece was filled: there may be more output.
    full: bool,
}

impl Inflater {
    /// For a blob from `offset` on.
    pub fn new(digest: Digest, offset: u64) -> Result<Inflater, InflateError> {
        let mut decoder = Decoder::new().map_err(InflateError::Broken)?;
        decoder.set_parameter(DParameter::WindowLogMax(WINDOW)).map_err(InflateError::Broken)?;
        let size = digest.size.saturating_sub(offset);
        let allowed = size.saturating_add(size / 64 + SLACK);
        Ok(Inflater { decoder, size, left: size, allowed, within: false, full: false })
    }

    /// The next piece of the blob, consumed from `input`; `None` when nothing is left in it.
    pub fn next(&mut self, input: &mut Bytes) -> Result<Option<Bytes>, InflateError> {
        while !input.is_empty() || self.full {
            let room = usize::try_from(self.left).map_or(CHUNK, |left| left.saturating_add(1).min(CHUNK));
            let mut piece = Vec::with_capacity(room);
            let (mut from, mut to) = (InBuffer::around(&input[..]), OutBuffer::around(&mut piece));
            let ahead = self.decoder.run(&mut from, &mut to).map_err(InflateError::Broken)?;
            let taken = from.pos();
            input.advance(taken);
            let size = self.size;
            self.allowed = self.allowed.checked_sub(taken as u64).ok_or(InflateError::Endless { size })?;
            self.left = self.left.checked_sub(piece.len() as u64).ok_or(InflateError::TooLong { size })?;
            if taken > 0 || !piece.is_empty() {
                self.within = ahead != 0;
            } else if !input.is_empty() {
                return Err(InflateError::Broken(io::ErrorKind::InvalidData.into()));
            }
            self.full = piece.len() == piece.capacity();
            if !piece.is_empty() {
                return Ok(Some(piece.into()));
            }
        }
        Ok(None)
    }

    /// Checks that the input may end here.
    pub fn finish(&self) -> Result<(), InflateError> {
        if self.within { Err(InflateError::Truncated) } else { Ok(()) }
    }
}

impl std::fmt::Debug for Inflater {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Inflater").field("size", &self.size).field("left", &self.left).finish_non_exhaustive()
    }
}

/// The whole blob from its compressed form. The content is not checked.
pub(super) fn inflate(digest: Digest, compressed: Bytes) -> Result<Bytes, InflateError> {
    let (mut inflater, mut input) = (Inflater::new(digest, 0)?, compressed);
    let mut content = Vec::new();
    while let Some(piece) = inflater.next(&mut input)? {
        content.extend_from_slice(&piece);
    }
    inflater.finish()?;
    Ok(content.into())
}

/// Whole blobs from their compressed forms, in order. The content is not checked.
pub async fn inflate_all(forms: Vec<(Digest, Bytes)>) -> Vec<(Digest, Result<Bytes, InflateError>)> {
    if forms.is_empty() {
        return Vec::new();
    }
    blocking(move || forms.into_iter().map(|(digest, form)| (digest, inflate(digest, form))).collect()).await
}

/// The compressed form of each blob, where it is worth it.
pub async fn deflate_all(contents: impl Iterator<Item = Bytes>) -> Vec<Option<Vec<u8>>> {
    let contents: Vec<Bytes> = contents.collect();
    blocking(move || {
        let mut deflater = Deflater::new();
        contents.iter().map(|content| deflater.as_mut()?.deflate(content)).collect()
    })
    .await
}

/// Compresses blobs that are sent together.
struct Deflater(Compressor<'static>);

impl Deflater {
    /// `None` when there is no memory for it.
    fn new() -> Option<Deflater> {
        Compressor::new(LEVEL).ok().map(Deflater)
    }

    /// The compressed form of a blob, where it is worth it.
    fn deflate(&mut self, content: &[u8]) -> Option<Vec<u8>> {
        if content.len() < LEAST {
            return None;
        }
        let probe = &content[..content.len().min(PROBE)];
        let compressed = self.0.compress(probe).ok().filter(|small| pays(small.len(), probe.len()))?;
        if probe.len() == content.len() { Some(compressed) } else { self.0.compress(content).ok() }
    }
}

/// Whether less than four fifths are left.
fn pays(compressed: usize, size: usize) -> bool {
    compressed.saturating_mul(5) < size.saturating_mul(4)
}

/// Whether a blob that begins like this is worth compressing.
pub(super) fn shrinks(beginning: &[u8]) -> bool {
    let probe = &beginning[..beginning.len().min(PROBE)];
    Deflater::new().is_some_and(|mut deflater| deflater.deflate(probe).is_some())
}

/// The compressed form of `chunks`, all in one frame. An error among them ends it with the same error.
pub fn deflated(digest: Digest, chunks: Chunks) -> Chunks {
    let fail = move |source| ReadError::Compress { digest, source };
    let state = Some((chunks, None));
    stream::try_unfold(state, move |state| async move {
        let Some((mut chunks, frame)) = state else { return Ok(None) };
        let mut frame: Encoder<'static, Vec<u8>> = match frame {
            Some(frame) => frame,
            None => Encoder::new(Vec::new(), LEVEL).map_err(fail)?,
        };
        while let Some(chunk) = chunks.next().await.transpose()? {
            frame = blocking(move || frame.write_all(&chunk).map(|()| frame)).await.map_err(fail)?;
            let ready = std::mem::take(frame.get_mut());
            if !ready.is_empty() {
                return Ok(Some((ready.into(), Some((chunks, Some(frame))))));
            }
        }
        let rest = blocking(move || frame.finish()).await.map_err(fail)?;
        Ok(Some((rest.into(), None)))
    })
    .boxed()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::conformance::{content, source};
    use crate::digest_of;

    fn text(length: usize) -> Bytes {
        b"a line of a log that says little\n".iter().copied().cycle().take(length).collect()
    }

    fn compressed(bytes: &[u8]) -> Vec<u8> {
        zstd::bulk::compress(bytes, LEVEL).unwrap()
    }

    /// Decompresses a form that arrives in pieces of `piece` bytes.
    fn arriving(digest: Digest, form: &[u8], piece: usize) -> Result<Vec<u8>, InflateError> {
        let (mut inflater, mut content) = (Inflater::new(digest, 0).unwrap(), Vec::new());
        for part in form.chunks(piece) {
            let mut part = Bytes::copy_from_slice(part);
            while let Some(some) = inflater.next(&mut part)? {
                assert!(some.len() <= CHUNK);
                content.extend_from_slice(&some);
            }
        }
        inflater.finish().map(|()| content)
    }

    #[test]
    fn test_blobs_come_back_whatever_the_pieces_and_frames() {
        for bytes in [Bytes::new(), text(1), text(3_000_000), content(1, CHUNK), content(2, 700_001)] {
            let digest = digest_of(&bytes);
            let (front, back) = bytes.split_at(bytes.len() / 3);
            let several = [compressed(front), compressed(b""), compressed(back)].concat();
            for form in [compressed(&bytes), several] {
                for piece in [1, 7, 100_000, usize::MAX] {
                    assert!(
                        arriving(digest, &form, piece.min(form.len())).unwrap() == bytes,
                        "{digest} {piece}"
                    );
                }
                assert_eq!(inflate(digest, form.into()).unwrap(), bytes);
            }
        }
        assert_eq!(inflate(Digest::EMPTY, Bytes::new()).unwrap(), "");
    }

    #[test]
    fn test_forms_that_are_not_whole_frames_are_refused() {
        let bytes = text(300_000);
        let (digest, form) = (digest_of(&bytes), compressed(&bytes));
        for end in 1..form.len() {
            let cut = inflate(digest, Bytes::copy_from_slice(&form[..end]));
            assert!(matches!(cut, Err(InflateError::Truncated)), "{end}: {cut:?}");
        }
        for garbage in [b"x" as &[u8], b"more than a frame begins with", &[0; 100]] {
            let form = [&form[..], garbage].concat();
            assert!(inflate(digest, form.into()).is_err());
        }
        assert!(matches!(inflate(digest, text(100)), Err(InflateError::Broken(_))));
    }

    #[test]
    fn test_no_more_comes_out_than_the_digest_names() {
        let bomb = compressed(&vec![0; 64 << 20]);
        assert!(bomb.len() < 10_000);
        for size in [0, 1, 1000, (64 << 20) - 1] {
            let digest = Digest { hash: [1; 32], size };
            let (mut inflater, mut input) = (Inflater::new(digest, 0).unwrap(), Bytes::from(bomb.clone()));
            let mut out = 0;
            let end = loop {
                match inflater.next(&mut input) {
                    Ok(Some(piece)) => out += piece.len() as u64,
                    end => break end,
                }
            };
            assert!(matches!(end, Err(InflateError::TooLong { .. })), "{size}: {end:?}");
            assert!(out <= size);
        }
        let boast = Digest { hash: [1; 32], size: 2 << 30 };
        assert_eq!(inflate(boast, compressed(b"17 bytes in there").into()).unwrap().len(), 17);
    }

    #[test]
    fn test_frames_without_content_come_to_an_end() {
        let nothing = compressed(b"").repeat(300_000);
        assert!(matches!(inflate(Digest::EMPTY, nothing.into()), Err(InflateError::Endless { .. })));
    }

    #[test]
    fn test_large_windows_are_refused() {
        let bytes = text(100_000);
        for (log, taken) in [(23, true), (24, false), (27, false)] {
            let mut encoder = Encoder::new(Vec::new(), LEVEL).unwrap();
            encoder.set_parameter(zstd::stream::raw::CParameter::WindowLog(log)).unwrap();
            encoder.write_all(&bytes).unwrap();
            let form = encoder.finish().unwrap();
            assert_eq!(inflate(digest_of(&bytes), form.into()).is_ok(), taken, "{log}");
        }
    }

    #[test]
    fn test_only_what_shrinks_is_compressed() {
        let mut deflater = Deflater::new().unwrap();
        assert!(deflater.deflate(&text(5000)).is_some_and(|form| form.len() < 500));
        assert!(deflater.deflate(&text(2_000_000)).is_some_and(|form| form.len() < 5000));
        for bytes in
            [content(1, 5000), text(100), Bytes::new(), [content(1, PROBE), text(PROBE)].concat().into()]
        {
            assert_eq!(deflater.deflate(&bytes), None, "{} bytes", bytes.len());
        }
        assert!(shrinks(&text(70_000)) && !shrinks(&content(1, 70_000)) && !shrinks(b""));
    }

    #[tokio::test]
    async fn test_streams_are_compressed_as_one_frame() {
        for bytes in [Bytes::new(), text(2_000_000), content(1, 900_000)] {
            let digest = digest_of(&bytes);
            let parts: Vec<_> = deflated(digest, source(&bytes, 100_000)).collect().await;
            let form: Vec<u8> = parts.into_iter().flat_map(|part| part.unwrap()).collect();
            assert_eq!(inflate(digest, form.into()).unwrap(), bytes);
        }
        let broken = stream::iter([Ok(text(10)), Err(ReadError::Absent { digest: Digest::EMPTY })]);
        let parts: Vec<_> = deflated(Digest::EMPTY, broken.boxed()).collect().await;
        assert!(matches!(parts.last(), Some(Err(ReadError::Absent { .. }))));
    }
}
