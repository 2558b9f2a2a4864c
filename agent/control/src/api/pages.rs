//! How much of a list one answer holds.
//!
//! Owns the limit. Invariant: whatever was submitted or reported, an answer with a part of a list stays below what a
//! client of gRPC takes that sets no limit of its own (4 MiB). The rest comes with the next call, which names the last
//! entry that came.

use agent_model::node::Finding;
use agent_proto::v1;
use prost::Message;

/// The most bytes of one page.
const PAGE: usize = 2 * 1024 * 1024;
/// The most bytes of one entry. A job that may be submitted is smaller.
const ENTRY: usize = PAGE - PAGE / 4;
/// The most characters that are left of a text of an entry that is larger.
const LEFT: usize = 200;

/// An entry of a list.
pub(super) trait Listable: Message + Sized {
    /// The same without what can be long, for one that is larger than a page.
    fn cut(self) -> Self;
}

/// The entries of one answer.
#[derive(Debug)]
pub(super) struct Page<T> {
    pub(super) entries: Vec<T>,
    /// Some did not fit.
    pub(super) more: bool,
    room: usize,
}

impl<T: Listable> Page<T> {
    pub(super) fn new() -> Page<T> {
        Page { entries: Vec::new(), more: false, room: PAGE }
    }

    /// Takes an entry if there is room for it; once there was none, never again.
    pub(super) fn take(&mut self, entry: T) -> bool {
        let entry = if entry.encoded_len() > ENTRY { entry.cut() } else { entry };
        let size = entry.encoded_len();
        self.more |= size > self.room;
        if !self.more {
            self.room -= size;
            self.entries.push(entry);
        }
        !self.more
    }

    /// The entries of a list that come after the one with this key, in the order of their keys; from the beginning with
    /// an empty one.
    pub(super) fn after(
        after: &str,
        list: impl IntoIterator<Item = T>,
        key: impl Fn(&T) -> String,
    ) -> Page<T> {
        let mut list: Vec<(String, T)> = list.into_iter().map(|entry| (key(&entry), entry)).collect();
        list.sort_by(|(one, _), (other, _)| one.cmp(other));
        let mut page = Page::new();
        let rest = list.into_iter().skip_while(|(key, _)| !after.is_empty() && key.as_str() <= after);
        let fits = |(_, entry): (String, T)| page.take(entry);
        let _ = { rest }.all(fits);
        page
    }
}

fn beginning(text: &str) -> String {
    text.chars().take(LEFT).collect()
}

/// A job that an earlier release took.
impl Listable for v1::Job {
    fn cut(self) -> v1::Job {
        let spec = self.spec.as_ref();
        let display_name = spec.map(|spec| beginning(&spec.display_name)).unwrap_or_default();
        let experiment = spec.map(|spec| beginning(&spec.experiment)).unwrap_or_default();
        let hidden = super::hide_what_it_does(self);
        let spec = hidden.spec.map(|spec| v1::JobSpec {
            display_name,
            experiment,
            command: "(too long for a list)".to_owned(),
            resources: spec.resources.map(|resources| v1::Resources {
                labels: Default::default(),
                docker_args: Vec::new(),
                ..resources
            }),
            ..spec
        });
        v1::Job { spec, detail: beginning(&hidden.detail), ..hidden }
    }
}

/// Only a node that is up to no good says so much of itself.
impl Listable for v1::Node {
    fn cut(self) -> v1::Node {
        let told = self.inventory.unwrap_or_default();
        let finding = Finding::bad(
            "inventory",
            "what the node reports of itself is too long for a list",
            "its environments, interpreters, GPUs and labels are not shown",
            "look at agentd on that machine",
        );
        let inventory = v1::Inventory {
            hostname: beginning(&told.hostname),
            cpus: told.cpus,
            memory_bytes: told.memory_bytes,
            disk_bytes: told.disk_bytes,
            slots: told.slots,
            findings: vec![finding.into()],
            ..v1::Inventory::default()
        };
        let preemption =
            self.preemption.map(|told| v1::Preemption { reason: beginning(&told.reason), ..told });
        v1::Node { inventory: Some(inventory), labels: Default::default(), preemption, ..self }
    }
}

impl Listable for v1::Asset {
    fn cut(self) -> v1::Asset {
        let data =
            Some(v1::Input { kind: Some(v1::input::Kind::Literal("(too long for a list)".to_owned())) });
        v1::Asset { description: beginning(&self.description), labels: Vec::new(), data, ..self }
    }
}

impl Listable for v1::Pool {
    fn cut(self) -> v1::Pool {
        v1::Pool {
            labels: Default::default(),
            machines: Vec::new(),
            orphans: Vec::new(),
            failure: None,
            ..self
        }
    }
}

impl Listable for v1::HistoryEvent {
    fn cut(self) -> v1::HistoryEvent {
        v1::HistoryEvent { text: beginning(&self.text), ..self }
    }
}

impl Listable for v1::TokenInfo {
    fn cut(self) -> v1::TokenInfo {
        v1::TokenInfo { labels: Default::default(), by: beginning(&self.by), ..self }
    }
}

/// Their fields are short.
impl Listable for v1::User {
    fn cut(self) -> v1::User {
        self
    }
}

/// Likewise.
impl Listable for v1::SecretName {
    fn cut(self) -> v1::SecretName {
        self
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn event(text: String) -> v1::HistoryEvent {
        v1::HistoryEvent { text, ..v1::HistoryEvent::default() }
    }

    #[test]
    fn test_a_list_of_any_size_comes_in_pages_that_each_client_takes() {
        let name = |number: usize| format!("{number:04}{}", "x".repeat(300_000));
        let all: Vec<v1::User> =
            (0..20).map(|number| v1::User { name: name(number), ..v1::User::default() }).collect();
        let (mut after, mut seen) = (String::new(), Vec::new());
        loop {
            let page = Page::after(&after, all.clone().into_iter().rev(), |user| user.name.clone());
            let answer = v1::ListUsersResponse { users: page.entries.clone(), more: page.more };
            assert!(answer.encoded_len() < 4 * 1024 * 1024);
            assert!(!page.entries.is_empty());
            after = page.entries.last().unwrap().name.clone();
            seen.extend(page.entries);
            if !page.more {
                break;
            }
        }
        assert_eq!(seen, all);
    }

    #[test]
    fn test_an_entry_larger_than_a_page_is_shown_without_what_is_long() {
        let spec = v1::JobSpec {
            display_name: "x".repeat(3_000_000),
            resources: Some(v1::Resources { docker_args: vec!["x".repeat(3_000_000)], ..Default::default() }),
            ..v1::JobSpec::default()
        };
        let job = v1::Job { job: "old".into(), spec: Some(spec), owner: "ada".into(), ..v1::Job::default() };
        let mut page = Page::new();
        assert!(page.take(job.clone()) && page.take(v1::Job { job: "next".into(), ..job }));
        assert_eq!((page.entries[0].job.as_str(), page.entries[0].owner.as_str()), ("old", "ada"));
        let mut page = Page::new();
        let node = v1::Node {
            inventory: Some(v1::Inventory { hostname: "x".repeat(4_000_000), ..Default::default() }),
            ..v1::Node::default()
        };
        assert!(page.take(node.clone()) && page.take(node));
        let mut page = Page::new();
        assert!(page.take(event("x".repeat(3_000_000))));
        assert_eq!(page.entries[0].text.len(), LEFT);
    }
}
