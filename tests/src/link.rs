//! The wire between a node and its controller, as something that can be cut.
//!
//! A [`Link`] is a unix socket that passes bytes on to another one. Each direction passes, or holds what it
//! reads back until it may pass again, as a network does that loses nothing for good; [`Link::break_all`]
//! ends every connection, as a network does that lost too much. It knows nothing of what it carries.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{UnixListener, UnixStream};
use tokio::sync::watch;

use crate::client::runtime;

/// What a link does.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
struct State {
    hold_up: bool,
    hold_down: bool,
    /// Connections of an earlier number are over.
    generation: u64,
}

/// Which way.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Way {
    /// From the node to the controller.
    Up,
    /// From the controller to the node.
    Down,
    /// Both.
    Both,
}

/// A wire that can be cut.
#[derive(Debug)]
pub struct Link {
    socket: PathBuf,
    state: Arc<watch::Sender<State>>,
    task: tokio::task::JoinHandle<()>,
}

impl Link {
    /// Listens at `socket` and passes everything on to `upstream`.
    pub fn new(socket: &Path, upstream: &Path) -> Link {
        let _inside = runtime().enter();
        let _ = std::fs::remove_file(socket);
        let listener = UnixListener::bind(socket).expect("the link listens");
        let state = Arc::new(watch::Sender::new(State::default()));
        let (shared, upstream) = (state.clone(), upstream.to_owned());
        let task = runtime().spawn(async move {
            while let Ok((near, _)) = listener.accept().await {
                runtime().spawn(carry(near, upstream.clone(), shared.subscribe()));
            }
        });
        Link { socket: socket.to_owned(), state, task }
    }

    /// Where it listens.
    pub fn socket(&self) -> &Path {
        &self.socket
    }

    /// From now on nothing gets through this way; it is kept.
    pub fn cut(&self, way: Way) {
        self.state.send_modify(|state| {
            state.hold_up |= way != Way::Down;
            state.hold_down |= way != Way::Up;
        });
    }

    /// Everything gets through again, first of all what was kept.
    pub fn heal(&self) {
        self.state.send_modify(|state| (state.hold_up, state.hold_down) = (false, false));
    }

    /// Ends every connection; new ones are made as the link's state allows.
    pub fn break_all(&self) {
        self.state.send_modify(|state| state.generation += 1);
    }
}

impl Drop for Link {
    fn drop(&mut self) {
        self.task.abort();
        self.break_all();
    }
}

/// Carries one connection until either side ends it.
async fn carry(near: UnixStream, upstream: PathBuf, state: watch::Receiver<State>) {
    let born = state.borrow().generation;
    // A connection through a cut wire is not made before it is healed.
    let mut wait = state.clone();
    if wait.wait_for(|state| !state.hold_up || state.generation != born).await.is_err() {
        return;
    }
    let Ok(far) = UnixStream::connect(upstream).await else { return };
    let ((near_read, near_write), (far_read, far_write)) = (near.into_split(), far.into_split());
    let mut ended = state.clone();
    tokio::select! {
        () = pass(near_read, far_write, state.clone(), |state| state.hold_up) => {}
        () = pass(far_read, near_write, state, |state| state.hold_down) => {}
        _ = ended.wait_for(|state| state.generation != born) => {}
    }
}

async fn pass(
    mut from: tokio::net::unix::OwnedReadHalf,
    mut to: tokio::net::unix::OwnedWriteHalf,
    mut state: watch::Receiver<State>,
    held: impl Fn(&State) -> bool,
) {
    let mut buffer = vec![0; 64 << 10];
    loop {
        // The kernel's buffers hold what waits, so a held side feels back-pressure, as on a real wire.
        if state.wait_for(|state| !held(state)).await.is_err() {
            return;
        }
        let Ok(read) = from.read(&mut buffer).await else { return };
        // Something may be read at the very moment the wire is cut.
        if read == 0 || state.wait_for(|state| !held(state)).await.is_err() {
            return;
        }
        if to.write_all(&buffer[..read]).await.is_err() {
            return;
        }
    }
}

#[cfg(test)]
mod tests {
    use std::io::{Read, Write};
    use std::os::unix::net;
    use std::time::Duration;

    use super::*;

    #[test]
    fn test_cut_holds_and_heal_delivers() {
        let dir = tempfile::tempdir().unwrap();
        let upstream = dir.path().join("up");
        let server = net::UnixListener::bind(&upstream).unwrap();
        let link = Link::new(&dir.path().join("link"), &upstream);
        let mut near = net::UnixStream::connect(link.socket()).unwrap();
        let (mut far, _) = server.accept().unwrap();
        let mut got = [0; 1];
        near.write_all(b"a").unwrap();
        far.read_exact(&mut got).unwrap();

        link.cut(Way::Up);
        near.write_all(b"b").unwrap();
        far.set_read_timeout(Some(Duration::from_millis(50))).unwrap();
        far.read_exact(&mut got).unwrap_err();
        far.write_all(b"c").unwrap();
        near.read_exact(&mut got).unwrap();
        assert_eq!(got, *b"c", "the other way goes on");
        link.heal();
        far.set_read_timeout(None).unwrap();
        far.read_exact(&mut got).unwrap();
        assert_eq!(got, *b"b");

        link.break_all();
        assert_eq!(near.read(&mut got).unwrap(), 0);
    }
}
