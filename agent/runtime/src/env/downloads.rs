//! What pip and uv say about their downloads, as the progress of a build.
//!
//! ```text
//! pip   "  Downloading https://host/numpy-1.26.4-cp311-….whl (18.3 MB)", one after the other
//!       "Progress 262144 of 18252005", for programs
//! uv    "Downloading scipy (33.7MiB)", several at once; " Downloaded scipy" for each that is there
//! ```
//!
//! Hides these words, and keeps the lines for programs out of the build log. Neither of the two says in advance how much
//! it will download in all, so that is not told.

use agent_env::{Phase, Progress};
use agent_model::size;

/// A line that is longer than this, in bytes, is passed on in pieces.
const LONGEST_LINE: usize = 64 << 10;

/// How many names are told at most.
const NAMED: usize = 3;

/// Reads the output of an installer as it arrives.
#[derive(Debug)]
pub(super) struct Downloads {
    one_by_one: bool,
    /// The beginning of a line whose end has not arrived.
    rest: Vec<u8>,
    /// What is being downloaded.
    active: Vec<PackageDownload>,
}

#[derive(Debug, PartialEq, Eq)]
struct PackageDownload {
    name: String,
    /// How much has arrived; `None` if that is not said.
    done: Option<u64>,
    /// 0 if that is not said.
    size: u64,
}

impl Downloads {
    /// Of pip, with `--progress-bar raw` where it knows that.
    pub(super) fn of_pip() -> Downloads {
        Downloads { one_by_one: true, rest: Vec::new(), active: Vec::new() }
    }

    /// Of uv.
    pub(super) fn of_uv() -> Downloads {
        Downloads { one_by_one: false, ..Downloads::of_pip() }
    }

    /// Takes what arrived; returns the part of it that is for people, and the progress if that has changed.
    pub(super) fn hear(&mut self, bytes: &[u8]) -> (Vec<u8>, Option<Progress>) {
        let (mut shown, mut progress) = (Vec::new(), None);
        self.rest.extend_from_slice(bytes);
        while let Some(end) = self.rest.iter().position(|byte| *byte == b'\n') {
            let line: Vec<u8> = self.rest.drain(..=end).collect();
            let text = String::from_utf8_lossy(&line);
            let measured = measured(&text);
            if measured.is_none() {
                shown.extend_from_slice(&line);
            }
            if self.take(text.trim(), measured) {
                progress = Some(Progress::of(Phase::Pip, self.describe()));
            }
        }
        if self.rest.len() > LONGEST_LINE {
            shown.append(&mut self.rest);
        }
        (shown, progress)
    }

    /// What is left when nothing more arrives.
    pub(super) fn end(self) -> Vec<u8> {
        self.rest
    }

    /// Whether the line changed what is being downloaded, or how much of it has arrived.
    fn take(&mut self, line: &str, measured: Option<(u64, u64)>) -> bool {
        if let Some((done, size)) = measured {
            let Some(download) = self.active.last_mut() else { return false };
            (download.done, download.size) = (Some(done), size.max(download.size));
            return true;
        }
        let was = self.active.len();
        let begins = line.strip_prefix("Downloading ").or_else(|| line.strip_prefix("Resuming download "));
        match line.strip_prefix("Downloaded ") {
            Some(name) => self.active.retain(|download| download.name != name),
            None if self.one_by_one => self.active.clear(),
            None => {}
        }
        self.active.extend(begins.map(PackageDownload::read));
        begins.is_some() || self.active.len() < was
    }

    /// `downloading numpy-1.26.4, 12 of 18 MiB`, or `downloading 2 packages (51.1 MiB): scipy, numpy`.
    fn describe(&self) -> String {
        match &self.active[..] {
            [] => String::new(),
            [PackageDownload { name, done: Some(done), size: 0 }] => {
                format!("downloading {name}, {}", size::binary(*done))
            }
            [PackageDownload { name, done: Some(done), size }] => {
                format!("downloading {name}, {}", size::part(*done, *size))
            }
            [PackageDownload { name, done: None, size: 0 }] => format!("downloading {name}"),
            [PackageDownload { name, done: None, size }] => {
                format!("downloading {name} ({})", size::binary(*size))
            }
            several => {
                let names: Vec<&str> = several.iter().take(NAMED).map(|one| one.name.as_str()).collect();
                let more = if several.len() > NAMED { " and others" } else { "" };
                let size = size::binary(several.iter().map(|one| one.size).sum());
                format!("downloading {} packages ({size}): {}{more}", several.len(), names.join(", "))
            }
        }
    }
}

impl PackageDownload {
    /// Reads `https://host/numpy-1.26.4-cp311-….whl (18.3 MB)` or `scipy (33.7MiB)`.
    fn read(text: &str) -> PackageDownload {
        let (place, size) = text.rsplit_once(" (").unwrap_or((text, ""));
        // Of a download that goes on, both what is there and the whole are told.
        let whole = size.trim_end_matches(')').rsplit('/').next().unwrap_or_default();
        let file = place.rsplit('/').next().unwrap_or(place).replace("%2B", "+");
        let file = file.strip_suffix(".metadata").unwrap_or(&file);
        let name = match file.strip_suffix(".whl") {
            Some(wheel) => wheel.splitn(3, '-').take(2).collect::<Vec<_>>().join("-"),
            None => {
                [".tar.gz", ".zip"].iter().find_map(|end| file.strip_suffix(end)).unwrap_or(file).to_owned()
            }
        };
        PackageDownload { name, done: None, size: bytes(whole).unwrap_or(0) }
    }
}

/// The numbers of a line that pip prints for programs.
fn measured(line: &str) -> Option<(u64, u64)> {
    let (done, size) = line.trim().strip_prefix("Progress ")?.split_once(" of ")?;
    Some((done.parse().ok()?, size.parse().ok()?))
}

/// The size that `18.3 MB`, `842 bytes` or `33.7MiB` means.
fn bytes(text: &str) -> Option<u64> {
    let (number, unit) = text.split_at(text.find(|c: char| !c.is_ascii_digit() && c != '.')?);
    let unit = match unit.trim() {
        "B" | "bytes" => 1.0,
        "kB" => 1e3,
        "MB" => 1e6,
        "GB" => 1e9,
        "KiB" => 1024.0,
        "MiB" => 1024.0 * 1024.0,
        "GiB" => 1024.0 * 1024.0 * 1024.0,
        _ => return None,
    };
    Some((number.parse::<f64>().ok()? * unit).round() as u64) // far below 2^64
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What is told after each line, as far as it has changed, and what is for the log.
    fn heard(mut downloads: Downloads, output: &str) -> (Vec<String>, String) {
        let (mut told, mut log) = (Vec::new(), Vec::new());
        for line in output.split_inclusive('\n') {
            let (shown, progress) = downloads.hear(line.as_bytes());
            told.extend(progress.map(|progress| progress.what));
            log.extend(shown);
        }
        log.extend(downloads.end());
        (told, String::from_utf8(log).unwrap())
    }

    #[test]
    fn test_pip_that_counts_is_told_in_bytes_and_its_log_is_for_people() {
        // Of pip 26.3, with `--progress-bar raw`.
        let output = "Looking in links: /opt/wheels\n\
            Collecting numpy==1.26.4\n  \
              Downloading numpy-1.26.4-cp311-cp311-manylinux_2_17_x86_64.manylinux2014_x86_64.whl (18.3 MB)\n\
            Progress 0 of 18252005\n\
            Progress 12262144 of 18252005\n\
            Collecting six\n  \
              Downloading six-1.17.0-py2.py3-none-any.whl (11 kB)\n\
            Installing collected packages: six, numpy\n\
            Successfully installed numpy-1.26.4 six-1.17.0";
        let (told, log) = heard(Downloads::of_pip(), output);
        assert_eq!(
            told,
            [
                "downloading numpy-1.26.4 (17.5 MiB)",
                "downloading numpy-1.26.4, 0 of 17.5 MiB",
                "downloading numpy-1.26.4, 11.7 of 17.5 MiB",
                "",
                "downloading six-1.17.0 (10.7 KiB)",
                ""
            ]
        );
        let people = output.split_inclusive('\n').filter(|line| !line.starts_with("Progress "));
        assert_eq!(log, people.collect::<String>());
    }

    #[test]
    fn test_uv_downloads_several_at_once() {
        // Of uv 0.13.9.
        let output = "Using Python 3.11.7 environment at: v3\n\
            Resolved 3 packages in 206ms\n\
            Downloading scipy (33.7MiB)\n\
            Downloading numpy (17.4MiB)\n \
             Downloaded numpy\n \
             Downloaded scipy\n\
            Prepared 3 packages in 1.18s\n";
        let (told, log) = heard(Downloads::of_uv(), output);
        assert_eq!(
            told,
            [
                "downloading scipy (33.7 MiB)",
                "downloading 2 packages (51.1 MiB): scipy, numpy",
                "downloading scipy (33.7 MiB)",
                ""
            ]
        );
        assert_eq!(log, output);
    }

    #[test]
    fn test_names_and_sizes_are_read_from_addresses() {
        let read = |text: &str| {
            let PackageDownload { name, size, .. } = PackageDownload::read(text);
            (name, size)
        };
        for (text, name, size) in [
            (
                "https://host/x/torch-2.1.0%2Bcu118-cp311-cp311-linux_x86_64.whl (2267.3 MB)",
                "torch-2.1.0+cu118",
                2_267_300_000,
            ),
            ("six-1.17.0-py2.py3-none-any.whl.metadata (842 bytes)", "six-1.17.0", 842),
            ("https://host/foo-1.0.tar.gz (1.0 MB/4.0 MB)", "foo-1.0", 4_000_000),
            ("scipy", "scipy", 0),
        ] {
            assert_eq!(read(text), (name.to_owned(), size));
        }
    }

    #[test]
    fn test_pieces_of_lines_are_put_together() {
        let mut downloads = Downloads::of_pip();
        assert_eq!(downloads.hear(b"  Downloading six-1.17.0.ta"), (Vec::new(), None));
        let (shown, progress) = downloads.hear(b"r.gz (11 kB)\nProgress 5");
        assert_eq!(shown, b"  Downloading six-1.17.0.tar.gz (11 kB)\n");
        assert_eq!(progress.unwrap().what, "downloading six-1.17.0 (10.7 KiB)");
        let (shown, progress) = downloads.hear(b"000 of 11000\n");
        assert_eq!(
            (shown, progress.unwrap().what.as_str()),
            (Vec::new(), "downloading six-1.17.0, 4.9 of 10.7 KiB")
        );
        assert_eq!(downloads.hear(&[b'.'; LONGEST_LINE + 1]).0.len(), LONGEST_LINE + 1);
    }
}
