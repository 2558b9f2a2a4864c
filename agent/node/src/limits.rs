//! What the kernel gives one user only so much of: watches of files, processes, namespaces and keys.
//!
//! Other programs of the same user take from the same, so jobs may find none left although the machine is idle. Owns
//! what is counted and where its limit is. What others hold is seen only of processes that this user may look into.

use std::collections::BTreeSet;
use std::fs;
use std::path::Path;

use agent_model::node::Finding;

use crate::Machine;

/// Something of which there is only so much.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Limit {
    what: &'static str,
    used: u64,
    most: u64,
    /// The command that raises it.
    raise: &'static str,
}

impl Limit {
    /// Less than a tenth of it is left.
    fn is_scarce(&self) -> bool {
        self.used.saturating_mul(10) >= self.most.saturating_mul(9)
    }
}

/// What processes hold.
#[derive(Debug, Default, PartialEq, Eq)]
struct InUse {
    instances: u64,
    watches: u64,
    /// Processes and threads.
    threads: u64,
    users: BTreeSet<String>,
    mounts: BTreeSet<String>,
}

/// Whether a job that starts now finds enough. What is enough is not counted out, so that the finding stays the same.
pub(crate) fn finding(machine: &Machine, uid: u32) -> Finding {
    judge(&limits(machine, uid))
}

fn judge(limits: &[Limit]) -> Finding {
    let scarce: Vec<&Limit> = limits.iter().filter(|limit| limit.is_scarce()).collect();
    let Some(first) = scarce.first() else {
        let found = "watches of files, processes, namespaces and keys are left";
        return Finding::good(
            "limits",
            found,
            "what the kernel gives one user only so much of is enough for jobs",
        );
    };
    let told: Vec<String> = scarce
        .iter()
        .map(|limit| match limit.most {
            0 => format!("no {} are given", limit.what),
            most => format!("nine tenths of {most} {} are taken", limit.what),
        })
        .collect();
    Finding::limited(
        "limits",
        told.join(", "),
        "a start that finds none left waits for it; a program of a job fails with `Too many open files`, `No space left \
         on device`, `Resource temporarily unavailable` or `Disk quota exceeded`",
        first.raise,
    )
}

fn limits(machine: &Machine, uid: u32) -> Vec<Limit> {
    let number = |path: &str| machine.read(path)?.trim().parse::<u64>().ok();
    let held = held(machine, uid);
    let limit = |what, used: u64, most: Option<u64>, raise| Some(Limit { what, used, most: most?, raise });
    let own = |name: &str| own_limit(&machine.read("proc/self/limits")?, name);
    // The superuser may have as many as the machine has numbers.
    let (threads, most, raise) = match uid {
        0 => {
            (all_threads(machine), number("proc/sys/kernel/pid_max"), "`sudo sysctl kernel.pid_max=4194304`")
        }
        _ => (
            held.threads,
            own("Max processes"),
            "raise `nproc` of this user in /etc/security/limits.conf; `ulimit -u` shows it",
        ),
    };
    let namespaces = |kind: &str| number(&format!("proc/sys/user/max_{kind}_namespaces"));
    let keys = machine.read("proc/key-users").and_then(|text| keys(&text, uid));
    let (keys, most_keys) = keys.unzip();
    [
        limit(
            "inotify instances",
            held.instances,
            number("proc/sys/fs/inotify/max_user_instances"),
            "`sudo sysctl fs.inotify.max_user_instances=1024`",
        ),
        limit(
            "inotify watches",
            held.watches,
            number("proc/sys/fs/inotify/max_user_watches"),
            "`sudo sysctl fs.inotify.max_user_watches=524288`",
        ),
        limit("processes and threads", threads, most, raise),
        limit(
            "user namespaces",
            held.users.len() as u64,
            namespaces("user"),
            "`sudo sysctl user.max_user_namespaces=65536`",
        ),
        limit(
            "mount namespaces",
            held.mounts.len() as u64,
            namespaces("mnt"),
            "`sudo sysctl user.max_mnt_namespaces=65536`",
        ),
        limit(
            "kernel keys",
            keys.unwrap_or(0),
            most_keys,
            if uid == 0 {
                "`sudo sysctl kernel.keys.root_maxkeys=1000000`"
            } else {
                "`sudo sysctl kernel.keys.maxkeys=2000`"
            },
        ),
    ]
    .into_iter()
    .flatten()
    .collect()
}

/// A soft limit of `/proc/self/limits`; `None` where there is none.
fn own_limit(text: &str, name: &str) -> Option<u64> {
    text.lines().find_map(|line| line.strip_prefix(name))?.split_whitespace().next()?.parse().ok()
}

/// Keys that count for a user and how many may, of `/proc/key-users`: `uid: usage nkeys/nikeys qnkeys/maxkeys …`.
fn keys(text: &str, uid: u32) -> Option<(u64, u64)> {
    let of_user = |line: &&str| line.split_once(':').is_some_and(|(user, _)| user.trim() == uid.to_string());
    let counted = text.lines().find(of_user)?.split_whitespace().nth(3)?;
    let (used, most) = counted.split_once('/')?;
    Some((used.parse().ok()?, most.parse().ok()?))
}

/// Every process and thread of the machine: the fourth field of `/proc/loadavg`, `running/all`.
fn all_threads(machine: &Machine) -> u64 {
    let text = machine.read("proc/loadavg").unwrap_or_default();
    let all = text.split_whitespace().nth(3).and_then(|field| field.split_once('/'));
    all.and_then(|(_, all)| all.parse().ok()).unwrap_or(0)
}

/// What the processes of a user hold.
fn held(machine: &Machine, uid: u32) -> InUse {
    let mut held = InUse::default();
    for entry in fs::read_dir(machine.at("proc")).into_iter().flatten().flatten() {
        if !entry.file_name().as_encoded_bytes().iter().all(u8::is_ascii_digit) {
            continue;
        }
        let process = entry.path();
        let status = fs::read_to_string(process.join("status")).unwrap_or_default();
        let field = |name: &str| {
            let value = status.lines().find_map(|line| line.strip_prefix(name))?;
            value.split_whitespace().next()?.parse::<u64>().ok()
        };
        if field("Uid:") == Some(uid.into()) {
            held.threads += field("Threads:").unwrap_or(1);
            hold(&mut held, &process);
        }
    }
    held
}

fn hold(held: &mut InUse, process: &Path) {
    for descriptor in fs::read_dir(process.join("fd")).into_iter().flatten().flatten() {
        let is_instance =
            fs::read_link(descriptor.path()).is_ok_and(|to| to.as_os_str() == "anon_inode:inotify");
        if is_instance {
            held.instances += 1;
            let told = fs::read_to_string(process.join("fdinfo").join(descriptor.file_name()));
            held.watches +=
                told.unwrap_or_default().lines().filter(|line| line.starts_with("inotify ")).count() as u64;
        }
    }
    let name = |kind: &str| Some(fs::read_link(process.join("ns").join(kind)).ok()?.display().to_string());
    held.users.extend(name("user"));
    held.mounts.extend(name("mnt"));
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;

    use agent_model::node::Grade;

    use super::*;

    /// A machine of user 1000, with these many inotify instances of his.
    fn machine(instances: usize) -> (tempfile::TempDir, Machine) {
        let dir = tempfile::tempdir().unwrap();
        let write = |path: &str, text: &str| {
            let path = dir.path().join(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        };
        write("proc/sys/fs/inotify/max_user_instances", "10\n");
        write("proc/sys/fs/inotify/max_user_watches", "1000\n");
        write("proc/sys/user/max_user_namespaces", "100\n");
        write("proc/sys/user/max_mnt_namespaces", "100\n");
        write("proc/self/limits", "Limit  Soft Limit  Hard Limit  Units\nMax processes  50  60  processes\n");
        write(
            "proc/key-users",
            "    0:     9 8/8 3/1000000 40/25000000\n 1000:    22 21/21 19/200 393/20000\n",
        );
        write("proc/7/status", "Name:\tcode\nUid:\t1000\t1000\t1000\t1000\nThreads:\t4\n");
        write("proc/8/status", "Name:\tother\nUid:\t0\t0\t0\t0\nThreads:\t400\n");
        for number in 0..instances {
            write(&format!("proc/7/fdinfo/{number}"), "pos:\t0\ninotify wd:1 ino:2\ninotify wd:2 ino:3\n");
            fs::create_dir_all(dir.path().join("proc/7/fd")).unwrap();
            symlink("anon_inode:inotify", dir.path().join(format!("proc/7/fd/{number}"))).unwrap();
        }
        fs::create_dir_all(dir.path().join("proc/7/ns")).unwrap();
        symlink("user:[4026531837]", dir.path().join("proc/7/ns/user")).unwrap();
        let machine = Machine { root: dir.path().to_owned() };
        (dir, machine)
    }

    #[test]
    fn test_what_a_user_has_of_each_is_counted_against_its_limit() {
        let (_dir, machine) = machine(3);
        let counted = |(what, used, most): (&'static str, u64, u64)| (what, used, most);
        let found: Vec<_> = limits(&machine, 1000)
            .iter()
            .map(|limit| counted((limit.what, limit.used, limit.most)))
            .collect();
        let expected = [
            ("inotify instances", 3, 10),
            ("inotify watches", 6, 1000),
            ("processes and threads", 4, 50),
            ("user namespaces", 1, 100),
            ("mount namespaces", 0, 100),
            ("kernel keys", 19, 200),
        ];
        assert_eq!(found, expected);
        assert_eq!(finding(&machine, 1000).grade, Grade::Good);
    }

    #[test]
    fn test_what_is_nearly_used_up_is_told_with_the_command_that_raises_it() {
        let (_dir, machine) = machine(9);
        let found = finding(&machine, 1000);
        assert_eq!(
            (found.grade, found.found.as_str()),
            (Grade::Limited, "nine tenths of 10 inotify instances are taken")
        );
        assert!(found.ends_in_a_command() && found.fix.unwrap().contains("fs.inotify.max_user_instances"));
        let none = Limit { what: "user namespaces", used: 0, most: 0, raise: "`sudo sysctl x=1`" };
        assert_eq!(judge(&[none]).found, "no user namespaces are given");
    }
}
