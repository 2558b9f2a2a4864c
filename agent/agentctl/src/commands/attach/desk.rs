//! Shows progress to the user who attaches, and asks questions, on the terminal even when standard input is a file.

use std::cell::RefCell;
use std::io::BufRead;

use agent_attach::{Desk, HostKey};

use crate::failure::Failure;
use crate::output::ask::ask;
use crate::output::{Output, Paper};

/// A terminal, or none, for the messages and questions of one machine.
pub(super) struct Terminal<'a, 'b> {
    output: &'a RefCell<&'b mut Output>,
    prefix: String,
    accept_new: bool,
    /// The last wait that was shown, so that it is shown once and not at each try.
    told: RefCell<String>,
}

impl<'a, 'b> Terminal<'a, 'b> {
    pub(super) fn new(
        output: &'a RefCell<&'b mut Output>,
        prefix: String,
        accept_new: bool,
    ) -> Terminal<'a, 'b> {
        Terminal { output, prefix, accept_new, told: RefCell::default() }
    }

    pub(super) fn paper(&self) -> Paper {
        self.output.borrow().note_paper()
    }

    pub(super) fn show(&self, text: &str) {
        self.output.borrow_mut().say(text);
    }

    pub(super) fn busy(&self, doing: &str) {
        self.output.borrow_mut().busy(&format!("{}{doing}", self.prefix));
    }

    /// What the user types at the terminal of this process, if it has one.
    fn ask(&self, question: &str, is_secret: bool) -> Option<String> {
        self.output.borrow_mut().rest();
        ask(&format!("{}{question}", self.prefix), is_secret)
    }
}

impl Desk for Terminal<'_, '_> {
    fn secret(&self, question: &str) -> Option<String> {
        // A question of a host may contain any characters.
        self.ask(&crate::output::text::clean(question), true)
    }

    fn trusts(&self, key: &HostKey<'_>) -> bool {
        if self.accept_new {
            let line = format!("{}the key of {} is {} from now on", self.prefix, key.host, key.fingerprint);
            self.output.borrow_mut().note(&line);
            return true;
        }
        let question = format!(
            "Nothing is known of {}. It shows the key {}.\nIs that its own? Type yes to go on: ",
            key.host, key.fingerprint
        );
        self.ask(&question, false).is_some_and(|typed| typed.trim() == "yes")
    }

    fn waits(&self, what: &str) {
        if *self.told.borrow() != what {
            what.clone_into(&mut self.told.borrow_mut());
            self.output.borrow_mut().note(&format!("{}{what}", self.prefix));
        }
    }

    fn sent(&self, bytes: u64, of: u64) {
        let (done, all) = (bytes >> 20, of >> 20);
        self.busy(&format!("sending the package, {done} of {all} MiB"));
    }
}

/// The first line of standard input.
pub(super) fn password_of_stdin() -> Result<String, Failure> {
    let mut line = String::new();
    let read = std::io::stdin().lock().read_line(&mut line);
    match read {
        Ok(length) if length > 0 => Ok(line.trim_end_matches(['\r', '\n']).to_owned()),
        _ => Err(Failure::refused(
            "standard input holds no password",
            "write it there: --password-stdin <FILE",
        )),
    }
}
