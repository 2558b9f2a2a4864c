//! Small blobs together, in messages the server takes.

use std::collections::{BTreeMap, HashMap};

use agent_model::Digest;
use bazel_remote_apis::build::bazel::remote::execution::v2 as reapi;
use bazel_remote_apis::google::rpc;
use bytes::Bytes;
use futures_util::stream::{self, StreamExt, TryStreamExt};
use tonic::{Code, Status};

use super::compression::{deflate_all, inflate};
use super::retry::{RetryPolicy, is_transient, wanted_pause};
use super::{
    IDENTITY, IN_FLIGHT, Remote, SILENCE, ZSTD, digest_from_wire, digest_to_wire, read_failure, within,
    write_failure,
};
use crate::digest_of;
use crate::store::{BATCH_BLOBS, BlobStore, ReadError, WriteError, batches};

/// What a blob in a batch costs beyond its bytes: digest, status and framing, rounded up.
const OVERHEAD: u64 = 256;

/// A message that every server takes, in bytes.
const SMALL_MESSAGE: u64 = 16 * 1024;

/// One direction.
pub(super) trait Transfer: Sync {
    /// What is known of a blob before.
    type Item: Clone + Send;
    /// What is known of it after.
    type Answer: Send;

    fn remote(&self) -> &Remote;
    fn digest(item: &Self::Item) -> Digest;
    /// One message for all items. An error concerns the message, not an item.
    fn together(
        &self,
        items: &[Self::Item],
    ) -> impl Future<Output = Result<Vec<Self::Answer>, Status>> + Send;
    /// A stream for one item.
    fn alone(&self, item: Self::Item) -> impl Future<Output = Self::Answer> + Send;
    /// The answer for an item whose message failed.
    fn failed(item: &Self::Item, status: Status) -> Self::Answer;
    /// The server's status for an item that failed.
    fn said(answer: &Self::Answer) -> Option<&Status>;
}

/// The answers for all `items`, in order. Those that failed and may succeed in a moment are tried again alone.
pub(super) async fn run<T: Transfer>(transfer: &T, items: Vec<T::Item>) -> Vec<T::Answer> {
    let budget = match transfer.remote().terms().await {
        Ok(terms) => terms.budget,
        Err(status) => return items.iter().map(|item| T::failed(item, status.clone())).collect(),
    };
    let (mut answers, mut retry) = (BTreeMap::new(), RetryPolicy::default());
    let mut open: Vec<(usize, T::Item)> = items.iter().cloned().enumerate().collect();
    loop {
        answers.extend(attempt(transfer, open, budget).await);
        let failed: Vec<(usize, &Status)> =
            answers.iter().filter_map(|(number, answer)| Some((*number, T::said(answer)?))).collect();
        // A retry delay from the server applies to the whole message.
        let may_do = |(_, status): &&(usize, &Status)| is_transient(status) || wanted_pause(status).is_some();
        let Some(status) = failed.iter().find(may_do).map(|(_, status)| (*status).clone()) else { break };
        let again: Vec<usize> = failed.iter().filter(may_do).map(|(number, _)| *number).collect();
        if retry.wait(status).await.is_err() {
            break;
        }
        open = again.into_iter().map(|number| (number, items[number].clone())).collect();
    }
    answers.into_values().collect()
}

/// One answer for each of these.
async fn attempt<T: Transfer>(
    transfer: &T,
    items: Vec<(usize, T::Item)>,
    budget: u64,
) -> Vec<(usize, T::Answer)> {
    let cost = |(_, item): &(usize, T::Item)| T::digest(item).size + OVERHEAD;
    let work = batches(items, budget, BATCH_BLOBS, cost);
    let work = work.into_iter().map(|batch| divide(transfer, batch, budget));
    let answers = stream::iter(work).buffer_unordered(IN_FLIGHT).collect::<Vec<_>>().await;
    answers.into_iter().flatten().collect()
}

/// The answers for a batch, which is halved as long as the server finds it too large, or finds something in
/// it so wrong that it looks at nothing else.
async fn divide<T: Transfer>(
    transfer: &T,
    batch: Vec<(usize, T::Item)>,
    budget: u64,
) -> Vec<(usize, T::Answer)> {
    let mut done = Vec::with_capacity(batch.len());
    let mut queue = vec![batch];
    while let Some(mut batch) = queue.pop() {
        if let [(number, item)] = &batch[..]
            && T::digest(item).size + OVERHEAD > budget
        {
            done.push((*number, transfer.alone(item.clone()).await));
            continue;
        }
        let items: Vec<T::Item> = batch.iter().map(|(_, item)| item.clone()).collect();
        let cost = items.iter().map(|item| T::digest(item).size + OVERHEAD).sum();
        match transfer.together(&items).await {
            Ok(answers) => done.extend(batch.into_iter().map(|(number, _)| number).zip(answers)),
            Err(status) if is_refusal(&status, cost) && batch.len() > 1 => {
                queue.push(batch.split_off(batch.len() / 2));
                queue.push(batch);
            }
            Err(status) if is_refusal(&status, cost) => {
                for (number, item) in batch {
                    done.push((number, transfer.alone(item).await));
                }
            }
            Err(status) => {
                done.extend(batch.iter().map(|(number, item)| (*number, T::failed(item, status.clone()))));
            }
        }
    }
    done
}

/// The server refuses the message of `cost` bytes as it is; a smaller one may succeed, unless the server asked for a
/// delay. One that lacks resources for a small message is not sent a still smaller one.
fn is_refusal(status: &Status, cost: u64) -> bool {
    let refused = match status.code() {
        Code::OutOfRange | Code::InvalidArgument => true,
        Code::ResourceExhausted => cost > SMALL_MESSAGE,
        _ => false,
    };
    refused && wanted_pause(status).is_none()
}

/// The answers by digest: whatever order, number and names the server chose for them.
fn by_digest<V>(
    answers: impl Iterator<Item = (Option<reapi::Digest>, Option<rpc::Status>, V)>,
) -> HashMap<Digest, Result<V, Status>> {
    let understood = |(digest, status, value): (Option<reapi::Digest>, Option<rpc::Status>, V)| {
        let status = status.unwrap_or_default();
        let result =
            if status.code == 0 { Ok(value) } else { Err(Status::new(status.code.into(), status.message)) };
        Some((digest_from_wire(&digest?).ok()?, result))
    };
    answers.filter_map(understood).collect()
}

fn left_out() -> Status {
    Status::internal("the answer leaves the blob out")
}

/// From the server.
pub(super) struct Get<'a>(pub &'a Remote);

impl Transfer for Get<'_> {
    type Item = Digest;
    type Answer = Result<Bytes, ReadError>;

    fn remote(&self) -> &Remote {
        self.0
    }

    fn digest(item: &Digest) -> Digest {
        *item
    }

    async fn together(&self, digests: &[Digest]) -> Result<Vec<Self::Answer>, Status> {
        if self.0.compressing().await.is_some_and(|terms| terms.zstd) {
            match self.ask(digests, &[ZSTD]).await {
                Ok(answers) if !answers.iter().any(is_damaged) => return Ok(answers),
                Err(status) if !is_refusal(&status, u64::MAX) => return Err(status),
                _ => self.0.link.give_up_compression(),
            }
        }
        self.ask(digests, &[]).await
    }

    async fn alone(&self, digest: Digest) -> Self::Answer {
        let pieces: Vec<Bytes> = self.0.read(digest, 0).await?.try_collect().await?;
        Ok(pieces.concat().into())
    }

    fn failed(digest: &Digest, status: Status) -> Self::Answer {
        Err(read_failure(*digest, status))
    }

    fn said(answer: &Self::Answer) -> Option<&Status> {
        match answer {
            Err(ReadError::Remote { source, .. }) => Some(source),
            _ => None,
        }
    }
}

impl Get<'_> {
    async fn ask(
        &self,
        digests: &[Digest],
        compressors: &[i32],
    ) -> Result<Vec<Result<Bytes, ReadError>>, Status> {
        let question = reapi::BatchReadBlobsRequest {
            digests: digests.iter().map(digest_to_wire).collect(),
            digest_function: reapi::digest_function::Value::Sha256 as i32,
            instance_name: self.0.instance(),
            acceptable_compressors: compressors.to_vec(),
        };
        let mut client = self.0.cas.clone();
        let trip = self.0.link.begin();
        let answer = within(SILENCE, client.batch_read_blobs(question)).await?.into_inner();
        trip.arrived(answer.responses.iter().map(|item| item.data.len() as u64).sum());
        let answers = by_digest(answer.responses.into_iter().map(|item| {
            let is_compressed = item.compressor == ZSTD;
            (item.digest, item.status, (Bytes::from(item.data), is_compressed))
        }));
        let check = |digest: &Digest| match answers.get(digest) {
            _ if *digest == Digest::EMPTY => Ok(Bytes::new()),
            Some(Ok((bytes, is_compressed))) => opened(*digest, bytes, *is_compressed),
            Some(Err(status)) => Err(read_failure(*digest, status.clone())),
            None => Err(read_failure(*digest, left_out())),
        };
        Ok(digests.iter().map(check).collect())
    }
}

/// The blob in an answer.
fn opened(digest: Digest, bytes: &Bytes, is_compressed: bool) -> Result<Bytes, ReadError> {
    let content = match is_compressed {
        true => inflate(digest, bytes.clone())
            .map_err(|source| ReadError::Inflate { digest, source: source.into() })?,
        false => bytes.clone(),
    };
    match digest_of(&content) {
        actual if actual == digest => Ok(content),
        actual => Err(ReadError::Corrupt { digest, actual }),
    }
}

fn is_damaged(answer: &Result<Bytes, ReadError>) -> bool {
    answer.as_ref().is_err_and(ReadError::is_damage)
}

/// To the server.
pub(super) struct Put<'a>(pub &'a Remote);

impl Transfer for Put<'_> {
    type Item = (Digest, Bytes);
    type Answer = Result<(), WriteError>;

    fn remote(&self) -> &Remote {
        self.0
    }

    fn digest(item: &(Digest, Bytes)) -> Digest {
        item.0
    }

    async fn together(&self, blobs: &[(Digest, Bytes)]) -> Result<Vec<Self::Answer>, Status> {
        if self.0.compressing().await.is_some_and(|terms| terms.zstd_batches) {
            let forms = deflate_all(blobs.iter().map(|(_, bytes)| bytes.clone())).await;
            if forms.iter().any(Option::is_some) {
                match self.send(blobs, forms).await {
                    Ok(answers) if answers.iter().all(Result::is_ok) => return Ok(answers),
                    Err(status) if !is_refusal(&status, u64::MAX) => return Err(status),
                    _ => self.0.link.give_up_compression(),
                }
            }
        }
        self.send(blobs, vec![None; blobs.len()]).await
    }

    async fn alone(&self, (digest, bytes): (Digest, Bytes)) -> Self::Answer {
        self.0.write(digest, stream::iter([Ok(bytes)]).boxed()).await
    }

    fn failed((digest, _): &(Digest, Bytes), status: Status) -> Self::Answer {
        Err(write_failure(*digest, status))
    }

    fn said(answer: &Self::Answer) -> Option<&Status> {
        match answer {
            Err(WriteError::Remote { source, .. }) => Some(source),
            _ => None,
        }
    }
}

impl Put<'_> {
    /// Sends each blob in its compressed form, where there is one.
    async fn send(
        &self,
        blobs: &[(Digest, Bytes)],
        forms: Vec<Option<Vec<u8>>>,
    ) -> Result<Vec<Result<(), WriteError>>, Status> {
        let request = |((digest, bytes), form): (&(Digest, Bytes), Option<Vec<u8>>)| {
            let compressor = if form.is_some() { ZSTD } else { IDENTITY };
            let data = form.unwrap_or_else(|| bytes.to_vec());
            let digest = Some(digest_to_wire(digest));
            reapi::batch_update_blobs_request::Request { digest, data, compressor }
        };
        let question = reapi::BatchUpdateBlobsRequest {
            requests: blobs.iter().zip(forms).map(request).collect(),
            digest_function: reapi::digest_function::Value::Sha256 as i32,
            instance_name: self.0.instance(),
        };
        let sent = question.requests.iter().map(|item| item.data.len() as u64).sum();
        let mut client = self.0.cas.clone();
        let trip = self.0.link.begin();
        let answer = within(SILENCE, client.batch_update_blobs(question)).await?.into_inner();
        trip.arrived(sent);
        let answers = by_digest(answer.responses.into_iter().map(|item| (item.digest, item.status, ())));
        let check = |(digest, bytes): &(Digest, Bytes)| match answers.get(digest) {
            _ if *digest == Digest::EMPTY && bytes.is_empty() => Ok(()),
            Some(Ok(())) => Ok(()),
            Some(Err(status)) if status.code() == Code::InvalidArgument => match digest_of(bytes) {
                actual if actual == *digest => Err(write_failure(*digest, status.clone())),
                actual => Err(WriteError::Mismatch { digest: *digest, actual }),
            },
            Some(Err(status)) => Err(write_failure(*digest, status.clone())),
            None => Err(write_failure(*digest, left_out())),
        };
        Ok(blobs.iter().map(check).collect())
    }
}
