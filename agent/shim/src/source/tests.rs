use std::fs::OpenOptions;
use std::io::Write as _;
use std::path::Path;

use super::*;

/// What was read, with a mark for everything that is no text.
#[derive(Default)]
struct Heard(String);

impl Heard {
    fn take(&mut self, piece: &Piece<'_>) {
        match piece {
            Piece::Bytes(bytes) => self.0.push_str(std::str::from_utf8(bytes).unwrap()),
            Piece::Hole(bytes) => self.0.push_str(&format!("<hole of {bytes}>")),
            Piece::Restart => self.0.push_str("<restart>"),
            Piece::Strange(what) => self.0.push_str(&format!("<{what}>")),
        }
    }
}

struct Bench {
    dir: tempfile::TempDir,
    source: Source,
    now: Instant,
    heard: Heard,
}

impl Bench {
    fn new() -> Bench {
        let dir = tempfile::tempdir().unwrap();
        let source = Source::new(dir.path().join("file"), 0, Vec::new());
        Bench { dir, source, now: Instant::now(), heard: Heard::default() }
    }

    fn path(&self) -> PathBuf {
        self.dir.path().join("file")
    }

    /// Writes a new file and renames it over the other.
    fn rename_over(&self, text: &str) {
        let new = self.dir.path().join("new");
        fs::write(&new, text).unwrap();
        fs::rename(new, self.path()).unwrap();
    }

    fn read(&mut self) {
        let (at, heard) = (Some(self.now), &mut self.heard);
        while self.source.read(at, |piece| heard.take(&piece)).unwrap() {}
    }

    fn read_after(&mut self, time: Duration) {
        self.now += time;
        self.read();
    }

    fn said(&mut self) -> String {
        std::mem::take(&mut self.heard.0)
    }

    fn rest(mut self) -> String {
        while self.source.read(None, |piece| self.heard.take(&piece)).unwrap() {}
        self.heard.0
    }
}

fn append(path: &Path, text: &str) {
    let mut file = OpenOptions::new().create(true).append(true).open(path).unwrap();
    file.write_all(text.as_bytes()).unwrap();
}

#[test]
fn test_file_that_grows_is_read_once() {
    let mut bench = Bench::new();
    bench.read();
    append(&bench.path(), "a\n");
    bench.read();
    append(&bench.path(), "b\n");
    bench.read();
    bench.read();
    assert_eq!(bench.rest(), "a\nb\n");
}

#[test]
fn test_rest_of_a_file_that_was_removed_comes_before_the_one_that_replaced_it() {
    for seen in [false, true] {
        let mut bench = Bench::new();
        append(&bench.path(), "a\n");
        bench.read();
        let mut old = OpenOptions::new().append(true).open(bench.path()).unwrap();
        fs::remove_file(bench.path()).unwrap();
        old.write_all(b"b\n").unwrap();
        if seen {
            bench.read();
        }
        append(&bench.path(), "c\n");
        bench.read();
        assert_eq!(bench.rest(), "a\nb\n<restart>c\n", "seen in between: {seen}");
    }
}

#[test]
fn test_file_written_anew_with_all_that_was_read_goes_on_behind_it() {
    let mut bench = Bench::new();
    append(&bench.path(), "a\nb\n");
    bench.read();
    bench.rename_over("a\nb\nc\n");
    bench.read();
    assert_eq!(bench.said(), "a\nb\nc\n");
    // In place, with a read in between.
    fs::write(bench.path(), "a\n").unwrap();
    bench.read_after(SETTLE / 4);
    assert!(bench.source.due().is_some());
    append(&bench.path(), "b\nc\nd\n");
    bench.read_after(SETTLE / 4);
    assert_eq!(bench.source.due(), None);
    assert_eq!(bench.rest(), "d\n");
}

#[test]
fn test_file_with_other_bytes_is_read_from_its_beginning_whatever_its_length() {
    for other in ["x\ny\n", "x\ny\nz\n"] {
        for in_place in [false, true] {
            let mut bench = Bench::new();
            append(&bench.path(), "a\nb\n");
            bench.read();
            if in_place {
                fs::write(bench.path(), other).unwrap()
            } else {
                bench.rename_over(other)
            }
            bench.read();
            assert_eq!(bench.rest(), format!("a\nb\n<restart>{other}"), "in place: {in_place}");
        }
    }
}

#[test]
fn test_shorter_file_has_begun_anew_after_a_moment_at_the_end_or_when_it_is_replaced() {
    for how in 0..3 {
        let mut bench = Bench::new();
        append(&bench.path(), "a\nb\n");
        bench.read();
        fs::write(bench.path(), "a\n").unwrap();
        bench.read();
        assert_eq!(bench.said(), "a\nb\n", "it may be on its way");
        match how {
            0 => bench.read_after(SETTLE),
            1 => bench.rename_over("d\ne\n"),
            _ => {}
        }
        let expected = if how == 1 { "<restart>a\n<restart>d\ne\n" } else { "<restart>a\n" };
        assert_eq!(bench.rest(), expected, "{how}");
    }
}

#[test]
fn test_cut_alone_is_not_worth_a_word() {
    let mut bench = Bench::new();
    append(&bench.path(), "a\n");
    bench.read();
    fs::write(bench.path(), "").unwrap();
    bench.read_after(SETTLE * 2);
    assert_eq!(bench.source.due(), None);
    append(&bench.path(), "b\n");
    bench.read();
    assert_eq!(bench.rest(), "a\n<restart>b\n");
}

#[test]
fn test_holes_are_passed_over_and_what_is_no_text_is_left_out() {
    const TERABYTE: u64 = 1 << 40;
    let mut bench = Bench::new();
    append(&bench.path(), "a\n");
    bench.read();
    OpenOptions::new().write(true).open(bench.path()).unwrap().set_len(TERABYTE).unwrap();
    bench.read();
    append(&bench.path(), "b\0c\n");
    bench.read();
    append(&bench.path(), "d\n");
    let heard = bench.rest();
    let (start, end) = heard.split_once("<hole of ").unwrap();
    let (hole, end) = end.split_once('>').unwrap();
    assert_eq!((start, end), ("a\n", "bc\nd\n"));
    assert!(TERABYTE - hole.parse::<u64>().unwrap() < 1 << 20, "{hole}");
}

#[test]
fn test_what_is_no_file_is_said_once_and_not_read() {
    type Make<'a> = &'a dyn Fn(&Path);
    let secret = tempfile::NamedTempFile::new().unwrap();
    fs::write(secret.path(), "secret\n").unwrap();
    let make: [(&str, Make<'_>); 3] = [
        ("a directory", &|path| fs::create_dir(path).unwrap()),
        ("a link", &|path| std::os::unix::fs::symlink(secret.path(), path).unwrap()),
        ("a pipe", &|path| {
            nix::unistd::mkfifo(path, nix::sys::stat::Mode::S_IRWXU).unwrap();
        }),
    ];
    for (what, make) in make {
        let mut bench = Bench::new();
        append(&bench.path(), "a\n");
        bench.read();
        fs::remove_file(bench.path()).unwrap();
        make(&bench.path());
        bench.read();
        bench.read();
        if bench.path().symlink_metadata().unwrap().is_dir() {
            fs::remove_dir(bench.path()).unwrap();
        } else {
            fs::remove_file(bench.path()).unwrap();
        }
        append(&bench.path(), "b\n");
        bench.read_after(SETTLE);
        assert_eq!(bench.rest(), format!("a\n<{what}><restart>b\n"));
    }
}

#[test]
fn test_one_call_reads_a_bounded_part() {
    let mut bench = Bench::new();
    append(&bench.path(), &"x".repeat(5 << 20));
    let mut count = 0;
    let mut take = |piece: Piece<'_>| {
        if let Piece::Bytes(bytes) = piece {
            count += bytes.len()
        }
    };
    assert!(bench.source.read(None, &mut take).unwrap());
    assert!(!bench.source.read(None, &mut take).unwrap());
    assert_eq!(count, 5 << 20);
}
