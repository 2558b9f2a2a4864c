//! What a suite costs: processor time, and what it waited for.
//!
//! A thread says which suite it works for ([`enter`]). Control groups are inherited, so what it starts is charged to
//! that suite too, whoever reaps it. Only the `cpuacct` hierarchy of cgroup v1 takes single threads without a change
//! for what is under test; where there is none, nothing is charged.
//!
//! Waits are those of [`eventually`](crate::eventually), by what was waited for. A test program of its own writes them
//! to the file that `AGENTD_TEST_WAITS` names, from where [`take_in`] adds them.

use std::cell::Cell;
use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::Write;
use std::path::{Path, PathBuf};
use std::sync::Mutex;
use std::time::Duration;

/// The variable that names the file of a test program.
pub const WAITS: &str = "AGENTD_TEST_WAITS";

/// Waits shorter than this are not told.
const TOLD: Duration = Duration::from_millis(100);

thread_local! {
    static SUITE: Cell<Option<&'static str>> = const { Cell::new(None) };
}

/// Seconds, by suite and by what was waited for.
static WAITED: Mutex<BTreeMap<(&'static str, String), f64>> = Mutex::new(BTreeMap::new());

/// Charges this thread, and whatever it starts, to a suite from here on.
pub fn enter(suite: &'static str) {
    SUITE.set(Some(suite));
    let Some(group) = group(suite) else { return };
    // Who may not do this is not charged.
    let _ = fs::create_dir_all(&group)
        .and_then(|()| fs::write(group.join("tasks"), rustix::thread::gettid().as_raw_nonzero().to_string()));
}

/// Processor time of a suite so far, in seconds; nothing where it is not counted.
pub fn processor(suite: &str) -> Option<f64> {
    let nanoseconds = fs::read_to_string(group(suite)?.join("cpuacct.usage")).ok()?;
    Some(nanoseconds.trim().parse::<f64>().ok()? / 1e9)
}

/// What a suite waited for, in seconds, the longest first.
pub fn waits(suite: &str) -> Vec<(String, f64)> {
    let waited = WAITED.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
    let own = waited.iter().filter(|((of, _), _)| *of == suite);
    let mut own: Vec<_> = own.map(|((_, what), seconds)| (what.clone(), *seconds)).collect();
    own.sort_by(|a, b| b.1.total_cmp(&a.1));
    own
}

/// Something was waited for.
#[allow(clippy::disallowed_methods, reason = "asks what it is part of")]
pub(crate) fn waited(what: &str, took: Duration) {
    if took < TOLD {
        return;
    }
    if let Some(suite) = SUITE.get() {
        add(suite, what, took.as_secs_f64());
    } else if let Some(file) = std::env::var_os(WAITS)
        && let Ok(mut file) = File::options().create(true).append(true).open(file)
    {
        let _ = writeln!(file, "{}\t{}", took.as_secs_f64(), what.replace(['\n', '\t'], " "));
    }
}

/// Adds what a test program of this suite waited for.
pub fn take_in(suite: &'static str, file: &Path) {
    for line in fs::read_to_string(file).unwrap_or_default().lines() {
        if let Some((seconds, what)) = line.split_once('\t') {
            add(suite, what, seconds.parse().unwrap_or_default());
        }
    }
}

/// Names and numbers differ from wait to wait, and are left out.
fn add(suite: &'static str, what: &str, seconds: f64) {
    let is_name = |word: &&str| word.contains(|letter: char| letter.is_ascii_digit());
    let words: Vec<&str> = what.split_whitespace().filter(|word| !is_name(word)).take(8).collect();
    let mut waited = WAITED.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
    *waited.entry((suite, words.join(" "))).or_default() += seconds;
}

fn group(suite: &str) -> Option<PathBuf> {
    let hierarchies = ["/sys/fs/cgroup/cpuacct", "/sys/fs/cgroup/cpu,cpuacct"].map(Path::new);
    let found = hierarchies.into_iter().find(|dir| dir.join("cpuacct.usage").exists())?;
    Some(found.join(format!("agentd-tests-{}", std::process::id())).join(suite))
}

/// Removes the groups. What still runs in one keeps it.
pub fn clear() {
    let Some(all) = group("x").and_then(|group| Some(group.parent()?.to_owned())) else { return };
    for entry in fs::read_dir(&all).into_iter().flatten().flatten() {
        let _ = fs::remove_dir(entry.path());
    }
    let _ = fs::remove_dir(all);
}
