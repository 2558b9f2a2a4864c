//! The bridge from async code to work that blocks.
//!
//! Hides that work reaches the runtime in a box, and its result comes back in one. The runtime's code for a task is
//! some thirty functions, and is compiled for every type of work: here there is one type, in the workspace there are
//! about 120 pieces of work. See ADR 0071.
//!
//! Invariants: a panic of the work is seen by whoever waits for it, as with the runtime's own function; work that has
//! begun is done to its end, whether or not somebody waits.

use std::any::Any;
use std::io;
use std::marker::PhantomData;
use std::pin::Pin;
use std::task::{Context, Poll};

use tokio::task::{JoinError, JoinHandle};

type Done = Box<dyn Any + Send>;
type Work = Box<dyn FnOnce() -> Done + Send>;

/// Runs `work` where it may block. A panic in it continues here; when the runtime shuts down this does not return.
pub fn blocking<T: Send + 'static>(
    work: impl FnOnce() -> T + Send + 'static,
) -> impl Future<Output = T> + Send {
    finished(boxed(work))
}

/// Runs `work` where it may block. A panic in it is an error.
///
/// # Errors
///
/// That of the work, or one of the kind `Other` if it panicked or the runtime shuts down.
pub fn blocking_io<T: Send + 'static>(
    work: impl FnOnce() -> io::Result<T> + Send + 'static,
) -> impl Future<Output = io::Result<T>> + Send {
    finished_io(boxed(work))
}

/// Starts `work` where it may block, now and not when somebody waits for it. A runtime must be there.
pub fn spawn_blocking<T: Send + 'static>(work: impl FnOnce() -> T + Send + 'static) -> Blocking<T> {
    Blocking { task: start(boxed(work)), result: PhantomData }
}

/// The result of [`spawn_blocking`]; the work goes on if this is dropped.
#[derive(Debug)]
pub struct Blocking<T> {
    task: JoinHandle<Done>,
    result: PhantomData<fn() -> T>,
}

impl<T: 'static> Future for Blocking<T> {
    type Output = Result<T, JoinError>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Result<T, JoinError>> {
        Pin::new(&mut self.task).poll(cx).map_ok(unboxed)
    }
}

fn boxed<T: Send + 'static>(work: impl FnOnce() -> T + Send + 'static) -> Work {
    Box::new(move || Box::new(work()))
}

fn unboxed<T: 'static>(done: Done) -> T {
    match done.downcast() {
        Ok(done) => *done,
        Err(_) => unreachable!("the result has the type of its work"),
    }
}

#[allow(clippy::disallowed_methods, reason = "the one place that gives work to the threads for it")]
fn start(work: Work) -> JoinHandle<Done> {
    tokio::task::spawn_blocking(work)
}

async fn finished<T: 'static>(work: Work) -> T {
    unboxed(outcome(work).await)
}

async fn outcome(work: Work) -> Done {
    match start(work).await {
        Ok(done) => done,
        Err(error) => match error.try_into_panic() {
            Ok(panic) => std::panic::resume_unwind(panic),
            // The runtime is shutting down, and this task with it: nobody is left to answer.
            Err(_) => std::future::pending().await,
        },
    }
}

async fn finished_io<T: 'static>(work: Work) -> io::Result<T> {
    start(work).await.map_err(io::Error::other).and_then(unboxed)
}

#[cfg(test)]
mod tests {
    use tokio::task::JoinSet;

    use super::*;

    #[tokio::test]
    async fn test_result_comes_back() {
        assert_eq!(blocking(|| vec![1, 2]).await, [1, 2]);
        assert_eq!(blocking_io(|| Ok("text")).await.unwrap(), "text");
        let refused = blocking_io(|| Err::<(), _>(io::ErrorKind::NotFound.into())).await;
        assert_eq!(refused.unwrap_err().kind(), io::ErrorKind::NotFound);
        assert_eq!(spawn_blocking(|| 7).await.unwrap(), 7);
    }

    #[tokio::test]
    async fn test_panic_is_seen_by_who_waits() {
        fn fails() -> u8 {
            panic!("out of cheese")
        }
        let panic = spawn_blocking(fails).await.unwrap_err().into_panic();
        assert_eq!(panic.downcast_ref(), Some(&"out of cheese"));
        let told = blocking_io(|| Ok(fails())).await.unwrap_err();
        assert_eq!(told.kind(), io::ErrorKind::Other);
        let mut waits = JoinSet::from_iter([blocking(fails)]);
        let panic = waits.join_next().await.unwrap().unwrap_err().into_panic();
        assert_eq!(panic.downcast_ref(), Some(&"out of cheese"));
    }

    #[tokio::test]
    async fn test_work_begins_when_it_is_spawned_and_otherwise_when_it_is_waited_for() {
        let (tell, told) = std::sync::mpsc::channel();
        let also = tell.clone();
        drop(blocking(move || also.send("never")));
        drop(spawn_blocking(move || tell.send("begun")));
        let told = spawn_blocking(move || told.iter().collect::<Vec<_>>());
        assert_eq!(told.await.unwrap(), ["begun"]);
    }
}
