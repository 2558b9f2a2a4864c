//! The hostile corpus: snapshots that nobody makes by accident, each with what must become of it.
//!
//! A case is data, made by the functions of the groups below; [`super::hostile`] tries them.

mod contents;
mod encodings;
mod links;
mod names;
mod shapes;

use agent_model::Digest;
use bytes::Bytes;

use crate::snapshots::forge::{Forge, Kind};

pub(crate) use contents::contents;
pub(crate) use encodings::encodings;
pub(crate) use links::links;
pub(crate) use names::names;
pub(crate) use shapes::shapes;

/// What must become of a case.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Fate {
    /// It is refused, in one of these ways.
    Refused(&'static [&'static str]),
    /// It is odd but harmless: it is laid out, with so many entries.
    Laid(usize),
}

/// A snapshot to be tried.
#[derive(Debug, Clone)]
pub(crate) struct Case {
    pub(crate) name: String,
    pub(crate) root: Digest,
    pub(crate) blobs: Vec<Bytes>,
    /// Bytes under a digest that is not theirs: what only a bad disk or a lying store has.
    pub(crate) forged: Vec<(Digest, Bytes)>,
    pub(crate) fate: Fate,
}

impl Case {
    pub(crate) fn new(name: impl Into<String>, forge: Forge, root: Digest, fate: Fate) -> Case {
        Case { name: name.into(), root, blobs: forge.blobs, forged: forge.forged, fate }
    }
}

/// The cases of a group.
#[derive(Debug, Default)]
pub(crate) struct Group(pub(crate) Vec<Case>);

impl Group {
    /// A root directory of these entries, which must be refused so.
    fn refused(&mut self, name: impl Into<String>, why: &'static [&'static str], entries: &[Vec<u8>]) {
        self.fated(name, Fate::Refused(why), |forge| forge.directory(entries));
    }

    /// A root directory of these entries, which is harmless.
    fn laid(&mut self, name: impl Into<String>, entries: &[Vec<u8>]) {
        self.fated(name, Fate::Laid(entries.len()), |forge| forge.directory(entries));
    }

    /// What `make` makes.
    fn fated(&mut self, name: impl Into<String>, fate: Fate, make: impl FnOnce(&mut Forge) -> Digest) {
        let mut forge = Forge::new();
        let root = make(&mut forge);
        self.0.push(Case::new(name, forge, root, fate));
    }
}

/// A harmless entry of this kind.
fn plain(kind: Kind, name: &str) -> Vec<u8> {
    kind.named(name.as_bytes())
}
