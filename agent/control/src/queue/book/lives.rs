//! What the database knows of what controllers gave: for each life of one, the number of the last commit that placed
//! something.
//!
//! A grant names the life and the commit that it was made in. One that the database has says nothing new: what became
//! of the attempt is on record, or was removed. One of a later commit, or of a life that the database never heard of, is
//! news: the database is older than the decision.
//!
//! Invariants: the number of a life is written with the commit that it counts, and never pruned, a few bytes for each
//! start; after a loss of rows every number is 0, because any of the lost rows may be what a grant tells of; once there
//! was news, or rows were lost, attempts begin above a gap, so that no number is given that a lost record gave.

use std::collections::{BTreeMap, BTreeSet};

use agent_model::Epoch;
use agent_model::protocol::grant::PlacedAt;

use crate::store::{Changes, Document, LifeRecord, Loaded, Missing};

/// How far above every number on record attempts go on. No job was tried so often in what a backup may lack.
const GAP: u64 = 1000;

/// See the module.
#[derive(Debug)]
pub(super) struct Lives {
    /// The last commit of each.
    of: BTreeMap<String, u64>,
    own: String,
    /// The next commit of this life has a placement in it already.
    places: bool,
    /// No attempt has a number up to this one; 0 without a gap.
    floor: u64,
    unwritten: BTreeSet<String>,
}

impl Lives {
    /// Those on record, and one that begins now.
    pub(super) fn new(loaded: &Loaded, own: String) -> Lives {
        let records = loaded.all(|one| if let Document::Life(life) = one { Some(life) } else { None });
        let floor = records.iter().map(|life| life.floor).max().unwrap_or_default();
        let of = records.into_iter().map(|life| (life.life, life.commit)).collect();
        let mut lives = Lives { of, own, places: false, floor, unwritten: BTreeSet::new() };
        if loaded.missing == Missing::Any {
            tracing::warn!(
                lives = lives.of.len(),
                "records were lost: any earlier order may be shown as news"
            );
            lives.of.values_mut().for_each(|last| *last = 0);
            lives.unwritten.extend(lives.of.keys().cloned());
        }
        if loaded.missing != Missing::Nothing {
            // What was given since an earlier gap may be missing too.
            let known = loaded.jobs.iter().map(|job| job.epoch.0).max().unwrap_or_default();
            lives.raise(known.max(floor));
        }
        lives
    }

    /// The mark of what is placed now: all of one commit have the same.
    pub(super) fn mark(&mut self) -> PlacedAt {
        let commit = self.of.entry(self.own.clone()).or_default();
        if !std::mem::replace(&mut self.places, true) {
            *commit += 1;
            self.unwritten.insert(self.own.clone());
        }
        PlacedAt { life: self.own.clone(), commit: *commit }
    }

    /// Whether the database cannot know what was placed then.
    pub(super) fn is_news(&self, mark: &PlacedAt) -> bool {
        self.of.get(&mark.life).is_none_or(|last| mark.commit > *last)
    }

    /// There was news of an attempt of this number: from now on attempts have numbers far above it.
    pub(super) fn leave_gap(&mut self, news: Epoch) {
        if self.floor <= news.0 {
            self.raise(news.0);
        }
    }

    fn raise(&mut self, above: u64) {
        self.floor = above.saturating_add(GAP);
        self.of.entry(self.own.clone()).or_default();
        self.unwritten.insert(self.own.clone());
    }

    /// The number of the attempt that follows `last`.
    pub(super) fn next(&self, last: Epoch) -> Epoch {
        Epoch(last.0.max(self.floor)).next()
    }

    pub(super) fn is_written(&self) -> bool {
        self.unwritten.is_empty()
    }

    pub(super) fn collect(&self, changes: &mut Changes) {
        let life = |life: &String| LifeRecord {
            life: life.clone(),
            commit: self.of.get(life).copied().unwrap_or_default(),
            floor: self.floor,
        };
        changes.documents.extend(self.unwritten.iter().map(life).map(Document::Life));
    }

    pub(super) fn written(&mut self) {
        self.unwritten.clear();
        self.places = false;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn mark(life: &str, commit: u64) -> PlacedAt {
        PlacedAt { life: life.into(), commit }
    }

    /// What the next controller loads.
    fn written(lives: &Lives, mut loaded: Loaded) -> Loaded {
        let mut changes = Changes::default();
        lives.collect(&mut changes);
        let names: Vec<String> = changes.documents.iter().map(Document::name).collect();
        loaded.documents.retain(|document| !names.contains(&document.name()));
        loaded.documents.extend(changes.documents);
        loaded
    }

    #[test]
    fn test_what_a_commit_on_record_placed_is_no_news() {
        let mut first = Lives::new(&Loaded::default(), "one".into());
        assert_eq!((first.mark(), first.mark()), (mark("one", 1), mark("one", 1)));
        let old_backup = written(&first, Loaded::default());
        first.written();
        assert_eq!(first.mark(), mark("one", 2));
        let latest = written(&first, old_backup);
        assert!([1, 2].iter().all(|commit| !first.is_news(&mark("one", *commit))));

        let second = Lives::new(&latest, "two".into());
        let news = |lives: &Lives, life, commit| lives.is_news(&mark(life, commit));
        assert!(!news(&second, "one", 1) && !news(&second, "one", 2));
        assert!(news(&second, "one", 3), "the backup was made before it");
        assert!(news(&second, "never heard of", 1));
        assert_eq!(second.next(Epoch(2)), Epoch(3));
    }

    #[test]
    fn test_after_a_loss_of_rows_everything_may_be_news_and_numbers_begin_above_a_gap() {
        let mut before = Lives::new(&Loaded::default(), "one".into());
        before.mark();
        let loaded = Loaded { missing: Missing::Any, ..written(&before, Loaded::default()) };
        let after = Lives::new(&loaded, "two".into());
        assert!(after.is_news(&mark("one", 1)));
        assert_eq!(after.next(Epoch(7)), Epoch(1001));
        // It stays so, and it grows.
        let mut later = Lives::new(&written(&after, loaded), "three".into());
        assert_eq!(later.next(Epoch(0)), Epoch(2001), "rows were lost again");
        later.leave_gap(Epoch(9));
        assert_eq!(later.next(Epoch(0)), Epoch(2001), "news from below the gap");
        later.leave_gap(Epoch(5000));
        assert_eq!((later.next(Epoch(0)), later.next(Epoch(9000))), (Epoch(6001), Epoch(9001)));
    }
}
