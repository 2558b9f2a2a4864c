//! Somebody did something to the files by which a supervisor is known: it writes them again.

use std::time::Instant;

use agent_shim::{Hello, JobDir};

use super::Supervisor;

impl Supervisor<'_> {
    /// The tracking file grew, or somebody did something to the files in the directory.
    pub(super) fn take_changes(&mut self) {
        let own = [self.dir.hello(), self.dir.socket(), self.dir.started()];
        if self.tracking.watch.take(&own, Instant::now()) {
            self.mend();
        }
    }

    /// Writes the files again by which others find this shim.
    fn mend(&mut self) {
        let is_own = |hello: Option<Hello>| hello.is_some_and(|hello| hello.instance == self.hello.instance);
        if !self.dir.read_hello().is_ok_and(is_own) {
            JobDir::clear_way(&self.dir.hello());
            let written = self.dir.write_hello(&self.hello);
            self.notes.say(format_args!("the hello record was harmed; written again: {written:?}"));
        }
        let started = self.dir.started();
        if !self.life.is_waiting() && self.dir.started_instance().is_none() && JobDir::clear_way(&started) {
            let _ = std::fs::remove_file(&started);
            let marked = self.dir.mark_started(&self.hello.instance);
            self.notes.say(format_args!("the mark of the start was harmed; made again: {marked:?}"));
        }
        match self.clients.mend(&self.dir.socket()) {
            Ok(false) => {}
            mended => self.notes.say(format_args!("the socket was harmed; made again: {mended:?}")),
        }
    }
}
