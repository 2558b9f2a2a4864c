//! A GPU driver that does what a test says, for machines without GPUs.
//!
//! [`FakeNvml`] builds the library of `tests/nvml/fake.c` into a directory of the test; [`State`] is what it says
//! from then on, in whatever process it is loaded. A state is replaced as a whole, so that no call sees half of
//! one. The words are explained in the C source. Stands alone: the tests of single crates include this file.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicU64, Ordering};

const SOURCE: &str = include_str!("../nvml/fake.c");

/// The library of a driver that is not one.
#[derive(Debug)]
pub struct FakeNvml;

impl FakeNvml {
    /// Builds it into a directory, with no GPUs; gives its path. Each is a library of its own.
    pub fn build(dir: &Path) -> PathBuf {
        compile(dir, "libnvidia-ml.so.1", &[])
    }

    /// The same as before 510: without the newer forms of calls.
    pub fn build_old(dir: &Path) -> PathBuf {
        compile(dir, "libnvidia-ml.so.470", &["-DOLD"])
    }
}

#[allow(clippy::disallowed_methods, reason = "builds what tests run with")]
fn compile(dir: &Path, name: &str, options: &[&str]) -> PathBuf {
    let (source, library) = (dir.join("nvml-fake.c"), dir.join(name));
    fs::write(&source, SOURCE).expect("the source is laid out");
    let mut cc = Command::new("cc");
    cc.args(["-shared", "-fPIC", "-Wall", "-Wextra", "-Werror"]).args(options);
    let built = cc.arg("-o").arg(&library).arg(&source).arg("-ldl").status();
    assert!(built.expect("a C compiler is installed: it links Rust").success(), "the fake does not build");
    library
}

/// A GPU, or a part of one, by its keys.
#[derive(Debug, Clone, Default)]
pub struct Card {
    keys: BTreeMap<String, String>,
    parts: Vec<Card>,
}

impl Card {
    /// A GPU that tells everything, with 80 GiB and nobody on it.
    pub fn new(index: usize) -> Card {
        Card::default()
            .set("uuid", uuid(index))
            .set("name", "NVIDIA H100 80GB HBM3")
            .set("memory", 80_u64 << 30)
            .set("used", 4 << 20)
            .set("utilization", 0)
            .set("temperature", 31)
            .set("power", 70_000)
            .set("pci", format!("00000000:{:02X}:00.0", 16 + index))
    }

    /// Gives it a key.
    pub fn set(mut self, key: &str, value: impl ToString) -> Card {
        self.keys.insert(key.to_owned(), value.to_string().replace(' ', "_"));
        self
    }

    /// Takes a key away: what asks for it is not supported.
    pub fn without(mut self, key: &str) -> Card {
        self.keys.remove(key);
        self
    }

    /// Divides it, or adds one more part.
    pub fn part(mut self, uuid: &str, memory: u64) -> Card {
        let part = Card::default().set("uuid", uuid).set("memory", memory).set("used", 0);
        self.parts.push(part);
        self.set("mig", 7)
    }

    fn line(&self, word: &str) -> String {
        let keys = self.keys.iter().map(|(key, value)| format!(" {key}={value}"));
        format!("{word}{}\n", keys.collect::<String>())
    }
}

/// The identifier of the GPU with a number.
pub fn uuid(index: usize) -> String {
    format!("GPU-{index:08x}-5ca1-ab1e-0000-0123456789ab")
}

/// What the driver says.
#[derive(Debug, Clone, Default)]
pub struct State {
    words: Vec<String>,
    cards: Vec<Card>,
}

impl State {
    /// A driver with as many GPUs, none of them used.
    pub fn with(count: usize) -> State {
        State::of((0..count).map(Card::new).collect())
    }

    /// A driver with these GPUs.
    pub fn of(cards: Vec<Card>) -> State {
        State { words: Vec::new(), cards }
    }

    /// Adds a line such as `init 9` or `hang nvmlDeviceGetName`.
    pub fn say(mut self, words: &str) -> State {
        self.words.push(words.to_owned());
        self
    }

    /// Changes one GPU.
    pub fn card(mut self, index: usize, change: impl FnOnce(Card) -> Card) -> State {
        self.cards[index] = change(self.cards[index].clone());
        self
    }

    /// A GPU that fell off the bus: not even a handle is given.
    pub fn lost(self, index: usize) -> State {
        self.card(index, |card| card.set("handle", 15))
    }

    /// From now on a library says this, at its next call, in every process.
    pub fn write(&self, library: &Path) {
        static WRITTEN: AtomicU64 = AtomicU64::new(0);
        let mut text = self.words.join("\n") + "\n";
        for card in &self.cards {
            text += &card.line("gpu");
            for part in &card.parts {
                text += &part.line("part");
            }
        }
        let mut new = library.as_os_str().to_owned();
        let number = WRITTEN.fetch_add(1, Ordering::Relaxed);
        let _ = write!(new, ".new.{}.{number}", std::process::id());
        fs::write(&new, text)
            .and_then(|()| fs::rename(&new, beside(library, "state")))
            .expect("it can be told");
    }
}

/// The processes that came to hang in a library, ended since or not.
pub fn hung(library: &Path) -> Vec<u32> {
    let text = fs::read_to_string(beside(library, "hung")).unwrap_or_default();
    text.lines().filter_map(|pid| pid.parse().ok()).collect()
}

/// A file of the fake: its `state`, the directory of its `users`, those that `hung`.
pub fn beside(library: &Path, ending: &str) -> PathBuf {
    let mut name = library.as_os_str().to_owned();
    name.push(".");
    name.push(ending);
    PathBuf::from(name)
}
