//! Uploads that arrive as a stream.
//!
//! Owns [`Upload`], one in progress, and [`Uploads`], all of them: the progress of the open ones, and for a while the
//! bytes of interrupted ones, so that the client can ask how many have arrived and continue there. At most [`PARKED`]
//! of these are kept; the oldest is dropped. Offsets are of the blob itself; within a compressed stream they count
//! from its first offset by the bytes received.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use agent_cas::remote::Form;
use agent_cas::remote::compression::Inflater;
use agent_cas::{Ingest, Store};
use agent_model::Digest;
use bytes::Bytes;
use parking_lot::{Mutex, MutexGuard};
use tokio::sync::Notify;
use tonic::Status;

use super::{Service, inflate_status, write_status};

/// Interrupted uploads that are kept.
pub(super) const PARKED: usize = 16;

/// How long they are kept, and then until the next call about an upload.
const PARKED_FOR: Duration = Duration::from_secs(300);

/// How long a continued upload waits for the end of the stream before: a dead connection is noticed by then.
const HANDED_ON: Duration = Duration::from_secs(25);

/// An upload in progress. If it is dropped unfinished, it is parked.
pub(super) struct Upload {
    name: String,
    ingest: Option<Ingest>,
    uploads: Arc<Uploads>,
    inflater: Option<Inflater>,
    /// Where in the blob the stream begins.
    start: u64,
    /// The bytes received in the stream.
    received: u64,
    /// The progress, for other calls that ask for it.
    told: Arc<AtomicU64>,
}

impl Upload {
    /// The bytes of the blob that are written.
    pub(super) fn written(&self) -> u64 {
        self.ingest.as_ref().map_or(0, Ingest::written)
    }

    /// The bytes received in the present stream.
    pub(super) fn received(&self) -> u64 {
        self.received
    }

    /// Takes the bytes of a message, which must continue where the last one ended.
    pub(super) async fn append(&mut self, offset: i64, mut bytes: Bytes) -> Result<(), Status> {
        let expected = self.start + self.received;
        if u64::try_from(offset) != Ok(expected) {
            return Err(wrong_offset(expected));
        }
        let Some(ingest) = &mut self.ingest else { return Err(wrong_offset(0)) };
        self.received += bytes.len() as u64;
        let result = match &mut self.inflater {
            Some(inflater) => append_inflated(ingest, inflater, &mut bytes).await,
            None => ingest.append(bytes).await.map_err(|error| write_status(&error)),
        };
        if result.is_err() {
            self.ingest = None;
        }
        self.told.store(self.written(), Ordering::Relaxed);
        result
    }

    /// Checks that the bytes are the blob, and stores it in `store`.
    pub(super) async fn finish(mut self, store: &Store) -> Result<(), Status> {
        let Some(ingest) = self.ingest.take() else { return Err(wrong_offset(0)) };
        if let Some(inflater) = &self.inflater {
            inflater.finish().map_err(|error| inflate_status(&error))?;
        }
        store.keep(ingest).await.map_err(|error| write_status(&error))
    }
}

async fn append_inflated(
    ingest: &mut Ingest,
    inflater: &mut Inflater,
    bytes: &mut Bytes,
) -> Result<(), Status> {
    while let Some(piece) = inflater.next(bytes).map_err(|error| inflate_status(&error))? {
        ingest.append(piece).await.map_err(|error| write_status(&error))?;
    }
    Ok(())
}

impl Drop for Upload {
    fn drop(&mut self) {
        self.uploads.end(std::mem::take(&mut self.name), &self.told, self.ingest.take());
    }
}

/// All uploads.
#[derive(Debug, Default)]
pub(super) struct Uploads {
    known: Mutex<Known>,
    /// Notified when an upload is closed.
    ended: Notify,
}

#[derive(Debug, Default)]
struct Known {
    /// The names and the progress of the open ones.
    open: Vec<(String, Arc<AtomicU64>)>,
    /// The interrupted ones, oldest first.
    parked: VecDeque<Parked>,
}

#[derive(Debug)]
struct Parked {
    name: String,
    ingest: Ingest,
    since: Instant,
}

impl Uploads {
    /// A new upload, or the one of this name that was interrupted at `offset`.
    pub(super) async fn begin(
        self: &Arc<Uploads>,
        service: &Service,
        name: &str,
        (digest, form): (Digest, Form),
        offset: i64,
    ) -> Result<Upload, Status> {
        if offset != 0 {
            // The end of its earlier connection may not be noticed yet.
            let _ = tokio::time::timeout(HANDED_ON, self.until_closed(name)).await;
        }
        let parked = self.take(name);
        let ingest = match parked.filter(|_| offset != 0) {
            Some(ingest) => ingest,
            None if offset == 0 => service.ingest(digest).await.map_err(|error| write_status(&error))?,
            None => return Err(wrong_offset(0)),
        };
        let start = ingest.written();
        let told = Arc::new(AtomicU64::new(start));
        self.lock().open.push((name.to_owned(), told.clone()));
        let (name, uploads, ingest) = (name.to_owned(), Arc::clone(self), Some(ingest));
        let mut upload = Upload { name, ingest, uploads, inflater: None, start, received: 0, told };
        if form == Form::Zstd {
            upload.inflater = Some(Inflater::new(digest, start).map_err(|error| inflate_status(&error))?);
        }
        Ok(upload)
    }

    fn lock(&self) -> MutexGuard<'_, Known> {
        let mut known = self.known.lock();
        known.parked.retain(|upload| upload.since.elapsed() < PARKED_FOR);
        known
    }

    /// An upload is closed; if it is unfinished, it is kept.
    fn end(&self, name: String, told: &Arc<AtomicU64>, left: Option<Ingest>) {
        let mut known = self.lock();
        known.open.retain(|(_, other)| !Arc::ptr_eq(other, told));
        self.ended.notify_waiters();
        let Some(ingest) = left else { return };
        known.parked.retain(|upload| upload.name != name);
        if known.parked.len() == PARKED {
            known.parked.pop_front();
        }
        known.parked.push_back(Parked { name, ingest, since: Instant::now() });
    }

    /// Waits until no upload of the name is open.
    async fn until_closed(&self, name: &str) {
        loop {
            let ended = self.ended.notified();
            if !self.lock().open.iter().any(|(other, _)| other == name) {
                return;
            }
            ended.await;
        }
    }

    fn take(&self, name: &str) -> Option<Ingest> {
        let parked = &mut self.lock().parked;
        let at = parked.iter().position(|upload| upload.name == name)?;
        parked.remove(at).map(|upload| upload.ingest)
    }

    /// The progress of an upload, open or interrupted.
    pub(super) fn written(&self, name: &str) -> u64 {
        let known = self.lock();
        let open = known.open.iter().rev().find(|(other, _)| other == name);
        let parked = || known.parked.iter().find(|upload| upload.name == name);
        match open {
            Some((_, told)) => told.load(Ordering::Relaxed),
            None => parked().map_or(0, |upload| upload.ingest.written()),
        }
    }
}

fn wrong_offset(expected: u64) -> Status {
    Status::out_of_range(format!("the upload goes on at offset {expected}"))
}
