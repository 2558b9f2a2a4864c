//! The protocol of a session: somebody's command in a job that runs, or a connection to a port of the job.
//!
//! The daemon asks the supervisor of the job ([`crate::wire::Request::Session`]), which hands the connection over to
//! the attendant, a process of the job. From there on the connection carries frames: a kind, a length, and that many
//! bytes. The first is [`FromUser::Open`], answered by [`FromJob::Ready`] or [`FromJob::Failed`]. Whoever closes the
//! connection ends the session.
//!
//! The attendant has the rights of the job, so the daemon trusts nothing that it says.

use std::io::{self, ErrorKind, Read};

use serde::{Deserialize, Serialize};

/// The most bytes in a frame behind its head.
pub const MOST: usize = 64 * 1024;

/// The bytes before those: the kind, and their number, the highest byte first.
pub const HEAD: usize = 5;

/// The kinds of frames: a message in JSON, data, and data of standard error.
const MESSAGE: u8 = 0;
const DATA: u8 = 1;
const ERROR_DATA: u8 = 2;

/// What a session is to.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum SessionTarget {
    /// A command.
    Command {
        /// The program and its arguments.
        argv: Vec<String>,
        /// The size of its terminal; without one it has pipes.
        terminal: Option<TerminalSize>,
        /// The kind of the terminal.
        term: String,
    },
    /// A port of the job's loopback.
    Port(u16),
}

/// The size of a terminal, in characters.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct TerminalSize {
    /// Lines.
    pub rows: u16,
    /// Characters of a line.
    pub columns: u16,
}

/// A frame to the attendant: data as they are, anything else as JSON.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum FromUser {
    /// The first.
    Open(SessionTarget),
    /// For standard input, the terminal or the port.
    #[serde(skip)]
    Data(Vec<u8>),
    /// No more data follows.
    EndOfData,
    /// The terminal has another size.
    Size(TerminalSize),
    /// A signal for the command.
    Signal(i32),
}

/// A frame of the attendant: data as they are, anything else as JSON.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum FromJob {
    /// It is open.
    Ready,
    /// Of standard output, the terminal or the port.
    #[serde(skip)]
    Out(Vec<u8>),
    /// Of standard error.
    #[serde(skip)]
    Err(Vec<u8>),
    /// The command ended with this code, or the other side closed the connection.
    End(u8),
    /// It could not be opened.
    Failed(SessionFailure),
}

/// Why a session could not be opened.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct SessionFailure {
    /// For people.
    pub why: String,
    /// The code that a shell would return, where a program could not be started.
    #[serde(default)]
    pub code: Option<u8>,
}

impl FromUser {
    /// As a frame. Data longer than [`MOST`] do not fit one.
    pub fn to_frame(&self) -> Vec<u8> {
        match self {
            FromUser::Data(data) => frame(DATA, data),
            other => message(other),
        }
    }

    /// From what [`read_frame`] returned.
    pub fn of_frame(kind: u8, bytes: Vec<u8>) -> io::Result<FromUser> {
        Ok(match kind {
            DATA => FromUser::Data(bytes),
            MESSAGE => serde_json::from_slice(&bytes)?,
            _ => return Err(ErrorKind::InvalidData.into()),
        })
    }
}

impl FromJob {
    /// As a frame.
    pub fn to_frame(&self) -> Vec<u8> {
        match self {
            FromJob::Out(data) => frame(DATA, data),
            FromJob::Err(data) => frame(ERROR_DATA, data),
            other => message(other),
        }
    }

    /// From the kind of a frame and its bytes.
    pub fn of_frame(kind: u8, bytes: Vec<u8>) -> io::Result<FromJob> {
        Ok(match kind {
            DATA => FromJob::Out(bytes),
            ERROR_DATA => FromJob::Err(bytes),
            MESSAGE => serde_json::from_slice(&bytes)?,
            _ => return Err(ErrorKind::InvalidData.into()),
        })
    }
}

/// The head of a frame of data, which may be written before it is known what follows.
pub fn data_head(of_standard_error: bool, length: usize) -> [u8; HEAD] {
    head(if of_standard_error { ERROR_DATA } else { DATA }, length)
}

fn head(kind: u8, length: usize) -> [u8; HEAD] {
    let [a, b, c, d] = u32::try_from(length).unwrap_or(u32::MAX).to_be_bytes();
    [kind, a, b, c, d]
}

fn frame(kind: u8, bytes: &[u8]) -> Vec<u8> {
    [&head(kind, bytes.len()), bytes].concat()
}

fn message(message: &impl Serialize) -> Vec<u8> {
    frame(MESSAGE, &serde_json::to_vec(message).unwrap_or_default()) // strings and numbers always serialise
}

/// The kind of a frame, and how many bytes follow its head.
pub fn parse_head(head: [u8; HEAD]) -> io::Result<(u8, usize)> {
    let [kind, length @ ..] = head;
    let length = u32::from_be_bytes(length) as usize;
    if length > MOST { Err(ErrorKind::InvalidData.into()) } else { Ok((kind, length)) }
}

/// Reads a frame: its kind, and its bytes. `None` at the end.
pub fn read_frame(from: &mut impl Read) -> io::Result<Option<(u8, Vec<u8>)>> {
    let mut head = [0; HEAD];
    match from.read_exact(&mut head) {
        Err(error) if error.kind() == ErrorKind::UnexpectedEof => return Ok(None),
        read => read?,
    }
    let (kind, length) = parse_head(head)?;
    let mut bytes = vec![0; length];
    from.read_exact(&mut bytes)?;
    Ok(Some((kind, bytes)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn test_frames_come_back_as_they_were_sent() {
        let size = TerminalSize { rows: 24, columns: 80 };
        let argv = vec!["sh".to_owned(), "-c".to_owned(), "é\n".to_owned()];
        let command = SessionTarget::Command { argv, terminal: Some(size), term: "xterm".to_owned() };
        let sent = [
            FromUser::Open(command),
            FromUser::Open(SessionTarget::Port(6006)),
            FromUser::Data(vec![0; MOST]),
            FromUser::Data(Vec::new()),
            FromUser::EndOfData,
            FromUser::Size(size),
            FromUser::Signal(2),
        ];
        for sent in sent {
            let (kind, bytes) = read_frame(&mut sent.to_frame().as_slice()).unwrap().unwrap();
            assert_eq!(FromUser::of_frame(kind, bytes).unwrap(), sent);
        }
        let failure = SessionFailure { why: "no".to_owned(), code: Some(127) };
        let sent = [
            FromJob::Ready,
            FromJob::Out(b"a".to_vec()),
            FromJob::Err(b"b".to_vec()),
            FromJob::End(3),
            FromJob::Failed(failure),
        ];
        for sent in sent {
            let (kind, bytes) = read_frame(&mut sent.to_frame().as_slice()).unwrap().unwrap();
            assert_eq!(FromJob::of_frame(kind, bytes).unwrap(), sent);
        }
        assert_eq!(data_head(true, 1), FromJob::Err(b"b".to_vec()).to_frame()[..HEAD]);
    }

    #[test]
    fn test_what_is_no_frame_is_refused_before_room_is_made_for_it() {
        assert!(read_frame(&mut [].as_slice()).unwrap().is_none());
        assert!(read_frame(&mut [DATA, 0xff, 0xff, 0xff, 0xff].as_slice()).is_err());
        assert!(read_frame(&mut [DATA, 0, 0, 0, 2, 1].as_slice()).is_err(), "cut short");
        assert!(FromUser::of_frame(9, Vec::new()).is_err() && FromJob::of_frame(9, Vec::new()).is_err());
        assert!(FromJob::of_frame(MESSAGE, b"{}".to_vec()).is_err());
    }
}
