//! Makes a job that the daemon accepts from the directory or file that the user names.
//!
//! ```text
//! DIR | FILE [-- command] ─ plan ─▶ Plan (a draft, and the files it names) ─ ship ─▶ JobSpec, blobs stored
//! ```
//!
//! [`Source::find`] says what is named. [`Plan::read`] touches only small files: the job file, requirements, conda files.
//! [`Plan::ship`] walks directories and sends what the store lacks; [`Plan::survey`] only reports what would be sent,
//! and [`check()`] what is wrong. Owns the meaning of a directory without a job file.

mod batch;
mod check;
mod conda;
pub(crate) mod made;
mod pipeline;
mod plan;
mod remark;
mod requirements;
mod ship;
mod source;
mod survey;
mod sweep;
mod text;

use std::io;
use std::path::Path;

use agent_model::{Code, Fault};

pub(crate) use check::{Findings, Mistake, check};
use pipeline::PipelinePlan;
pub(crate) use plan::{Changes, Plan, job_name, quoted};
pub(crate) use remark::Remark;
pub(crate) use ship::{Care, send};
pub(crate) use source::Source;
pub(crate) use survey::{SentPart, describe};
pub(crate) use sweep::make_sweep;
pub(crate) use text::read as read_text;

/// A fault about the content of `file`.
fn in_file(file: &Path, mut fault: Fault) -> Fault {
    fault.what = format!("{}: {}", file.display(), fault.what);
    fault
}

fn read(path: &Path, what: &str) -> Result<String, Fault> {
    read_text(path).map_err(|error| unreadable(path, what, &error))
}

fn unreadable(path: &Path, what: &str, error: &io::Error) -> Fault {
    let fix = match error.kind() {
        io::ErrorKind::NotFound => "correct the path: it is relative to the file that names it",
        io::ErrorKind::InvalidData => "save it as UTF-8",
        _ => "make it readable for you",
    };
    Fault::new(Code::JobFile, format!("{what} `{}` cannot be read", path.display())).because(error).fix(fix)
}

#[cfg(test)]
mod tests {
    use std::fs;

    /// A directory with these files.
    pub(super) fn project(files: &[(&str, &str)]) -> tempfile::TempDir {
        let dir = tempfile::tempdir().unwrap();
        for (path, text) in files {
            let path = dir.path().join(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        }
        dir
    }
}
