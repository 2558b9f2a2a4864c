//! Sends the log to systemd's journal with fields, so that it can be asked for a job, a replica or a fault code:
//! `journalctl AGENTD_JOB=train-1`.
//!
//! Owns the form of the journal's own protocol, one datagram for each event. The text of an event is the same as on
//! standard error. One that the journal does not take goes there.

use std::fmt::{self, Write as _};
use std::io::{self, Write as _};
use std::os::unix::fs::MetadataExt;
use std::os::unix::net::UnixDatagram;
use std::path::Path;

use agent_model::{Code, ReplicaId};
use tracing::field::{Field, Visit};
use tracing::{Event, Level, Subscriber};
use tracing_subscriber::Layer;
use tracing_subscriber::layer::Context;

/// Where the journal takes events.
const SOCKET: &str = "/run/systemd/journal/socket";
/// The longest text of an event, in bytes: a datagram is limited, and nobody reads more. With it, no event is so large
/// that it would have to be passed as a sealed file.
const LONGEST: usize = 64 * 1024;

/// A layer that writes to the journal.
pub(crate) struct JournalLog(UnixDatagram);

impl JournalLog {
    /// If standard error is the stream that systemd connected to the journal, which `JOURNAL_STREAM` names.
    pub(crate) fn connect(stream: Option<&str>) -> Option<JournalLog> {
        let about = std::fs::metadata("/proc/self/fd/2").ok()?;
        let is_ours = stream? == format!("{}:{}", about.dev(), about.ino());
        is_ours.then(|| JournalLog::open(Path::new(SOCKET)).ok())?
    }

    fn open(socket: &Path) -> io::Result<JournalLog> {
        let journal = UnixDatagram::unbound()?;
        journal.connect(socket)?;
        // A journal that hangs must not hold up the daemon.
        journal.set_nonblocking(true)?;
        Ok(JournalLog(journal))
    }
}

impl<S: Subscriber> Layer<S> for JournalLog {
    fn on_event(&self, event: &Event<'_>, _: Context<'_, S>) {
        let mut line = JournalLine::default();
        event.record(&mut line);
        let about = event.metadata();
        if self.0.send(&line.datagram(*about.level(), about.target())).is_err() {
            let text = line.text(about.target());
            // There is no other place to report it.
            let _ = writeln!(io::stderr(), "{} {text}", about.level());
        }
    }
}

/// What an event says.
#[derive(Debug, Default)]
struct JournalLine {
    message: String,
    /// All other fields, as on standard error: ` replica=train-1.1.0 step=running`.
    fields: String,
    job: Option<String>,
    replica: Option<String>,
    code: Option<Code>,
}

impl JournalLine {
    fn take(&mut self, name: &str, value: &str, shown: &str) {
        match name {
            "message" => return self.message.push_str(value),
            "job" => self.job = Some(value.to_owned()),
            "replica" => {
                self.replica = Some(value.to_owned());
                if let Ok(replica) = value.parse::<ReplicaId>() {
                    self.job = Some(replica.job.to_string());
                }
            }
            // A fault begins with its code.
            "fault" | "code" => self.code = value.split(':').next().and_then(Code::parse),
            _ => {}
        }
        // Writing to a string cannot fail.
        let _ = write!(self.fields, " {name}={shown}");
    }

    fn text(&self, target: &str) -> String {
        let mut text = format!("{target}: {}{}", self.message, self.fields);
        if text.len() > LONGEST {
            text.truncate(text.floor_char_boundary(LONGEST));
        }
        text
    }

    fn datagram(&self, level: Level, target: &str) -> Vec<u8> {
        let priority = match level {
            Level::ERROR => "3",
            Level::WARN => "4",
            Level::INFO => "6",
            _ => "7",
        };
        let code = self.code.map(|code| code.as_str().to_owned());
        let fields = [
            ("MESSAGE", Some(self.text(target))),
            ("PRIORITY", Some(priority.to_owned())),
            ("SYSLOG_IDENTIFIER", Some("agentd".to_owned())),
            ("AGENTD_JOB", self.job.clone()),
            ("AGENTD_REPLICA", self.replica.clone()),
            ("AGENTD_CODE", code),
        ];
        let mut datagram = Vec::new();
        for (name, value) in fields {
            if let Some(value) = value {
                append(&mut datagram, name, &value);
            }
        }
        datagram
    }
}

/// A field in the form that allows any value: its length comes first.
fn append(datagram: &mut Vec<u8>, name: &str, value: &str) {
    datagram.extend_from_slice(name.as_bytes());
    datagram.push(b'\n');
    datagram.extend_from_slice(&(value.len() as u64).to_le_bytes());
    datagram.extend_from_slice(value.as_bytes());
    datagram.push(b'\n');
}

impl Visit for JournalLine {
    fn record_str(&mut self, field: &Field, value: &str) {
        self.take(field.name(), value, &format!("{value:?}"));
    }

    fn record_error(&mut self, field: &Field, value: &(dyn std::error::Error + 'static)) {
        let told = agent_model::causes::tell(value);
        self.take(field.name(), &told, &told);
    }

    fn record_debug(&mut self, field: &Field, value: &dyn fmt::Debug) {
        let told = format!("{value:?}");
        self.take(field.name(), &told, &told);
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use agent_model::Fault;
    use tracing_subscriber::layer::SubscriberExt;

    use super::*;

    /// Reads what the journal would.
    fn read(mut datagram: &[u8]) -> BTreeMap<String, String> {
        let mut fields = BTreeMap::new();
        while let Some(end) = datagram.iter().position(|byte| *byte == b'\n') {
            let name = String::from_utf8(datagram[..end].to_vec()).unwrap();
            let (length, rest) = datagram[end + 1..].split_first_chunk::<8>().unwrap();
            let (value, rest) = rest.split_at(usize::try_from(u64::from_le_bytes(*length)).unwrap());
            fields.insert(name, String::from_utf8(value.to_vec()).unwrap());
            datagram = rest.strip_prefix(b"\n").unwrap();
        }
        fields
    }

    #[test]
    fn test_events_reach_the_journal_with_fields() {
        let home = tempfile::tempdir().unwrap();
        let journal = UnixDatagram::bind(home.path().join("socket")).unwrap();
        let layer = JournalLog::open(&home.path().join("socket")).unwrap();
        let subscriber = tracing_subscriber::registry().with(layer);
        tracing::subscriber::with_default(subscriber, || {
            let fault = Fault::new(Code::NodeTaken, "it is\ntaken");
            tracing::warn!(replica = "train-1.2.0", %fault, tries = 3, "cannot start");
            tracing::info!(job = %"train-7", "queued job");
        });
        let next = || {
            let mut datagram = vec![0; 1 << 16];
            let length = journal.recv(&mut datagram).unwrap();
            read(&datagram[..length])
        };
        let first = next();
        assert_eq!((first["PRIORITY"].as_str(), first["AGENTD_CODE"].as_str()), ("4", "NODE-110"));
        assert_eq!(
            (first["AGENTD_JOB"].as_str(), first["AGENTD_REPLICA"].as_str()),
            ("train-1", "train-1.2.0")
        );
        let text = &first["MESSAGE"];
        assert!(
            text.ends_with("cannot start replica=\"train-1.2.0\" fault=NODE-110: it is\ntaken tries=3"),
            "{text}"
        );
        let second = next();
        assert_eq!(
            (second["AGENTD_JOB"].as_str(), second["SYSLOG_IDENTIFIER"].as_str()),
            ("train-7", "agentd")
        );
        assert!(!second.contains_key("AGENTD_REPLICA") && !second.contains_key("AGENTD_CODE"));
    }

    /// A journal, and what writes to it.
    fn journal(home: &tempfile::TempDir) -> (UnixDatagram, impl Subscriber + use<>) {
        let journal = UnixDatagram::bind(home.path().join("socket")).unwrap();
        let layer = JournalLog::open(&home.path().join("socket")).unwrap();
        (journal, tracing_subscriber::registry().with(layer))
    }

    fn received(journal: &UnixDatagram) -> Vec<u8> {
        let mut datagram = vec![0; 1 << 18];
        let length = journal.recv(&mut datagram).unwrap();
        datagram.truncate(length);
        datagram
    }

    #[test]
    fn test_the_bytes_are_those_of_the_journals_protocol() {
        let home = tempfile::tempdir().unwrap();
        let (journal, subscriber) = journal(&home);
        tracing::subscriber::with_default(subscriber, || {
            tracing::error!(target: "t", replica = %"train-1.2.0", code = %"NODE-110", "one\ntwo");
        });
        // A name, the length of the value as 64 bits with the least first, the value, which may have lines.
        let expected = [
            &b"MESSAGE\n\x2c\0\0\0\0\0\0\0t: one\ntwo replica=train-1.2.0 code=NODE-110\n"[..],
            b"PRIORITY\n\x01\0\0\0\0\0\0\x003\n",
            b"SYSLOG_IDENTIFIER\n\x06\0\0\0\0\0\0\0agentd\n",
            b"AGENTD_JOB\n\x07\0\0\0\0\0\0\0train-1\n",
            b"AGENTD_REPLICA\n\x0b\0\0\0\0\0\0\0train-1.2.0\n",
            b"AGENTD_CODE\n\x08\0\0\0\0\0\0\0NODE-110\n",
        ];
        let datagram = received(&journal);
        assert_eq!(datagram, expected.concat(), "{}", String::from_utf8_lossy(&datagram));
    }

    #[test]
    fn test_a_long_event_is_cut_between_characters_and_is_one_datagram() {
        let home = tempfile::tempdir().unwrap();
        let (journal, subscriber) = journal(&home);
        tracing::subscriber::with_default(subscriber, || {
            tracing::info!(target: "t", job = %"train-1", "{}", "\u{e4}".repeat(LONGEST));
        });
        let fields = read(&received(&journal));
        // `t: ` is odd, so a character of two bytes would be halved.
        assert_eq!(fields["MESSAGE"].len(), LONGEST - 1);
        assert!(fields["MESSAGE"].ends_with('\u{e4}'));
        assert_eq!(fields["AGENTD_JOB"], "train-1", "the fields are whole");
    }

    #[test]
    fn test_a_journal_that_takes_nothing_holds_nobody_up() {
        let home = tempfile::tempdir().unwrap();
        let (journal, subscriber) = journal(&home);
        tracing::subscriber::with_default(subscriber, || {
            while JournalLog::open(&home.path().join("socket")).unwrap().0.send(b"X=1\n").is_ok() {}
            tracing::info!("goes to standard error");
            journal.set_nonblocking(true).unwrap();
            let mut taken = [0; 64];
            while journal.recv(&mut taken).is_ok_and(|length| length > 0) {
                assert!(taken.starts_with(b"X=1\n"), "the event is not in between");
            }
            tracing::info!(target: "t", "comes through again");
        });
        assert_eq!(read(&received(&journal))["MESSAGE"], "t: comes through again");
    }

    #[test]
    fn test_another_standard_error_is_not_the_journals() {
        assert!(JournalLog::connect(None).is_none());
        assert!(JournalLog::connect(Some("1:2")).is_none());
    }
}
