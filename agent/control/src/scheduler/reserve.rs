//! Reservations (promises) of nodes for jobs that wait for room, and how others may use these nodes meanwhile.
//!
//! A job is promised the nodes where it can start soonest. The time of its start is known if every job in its way has
//! a time limit. Then another job may run there if it ends before, or fits beside the promised one. If the time is
//! unknown, the nodes take no new jobs until the promised one starts. The first [`MOST`] jobs of the line have a
//! promise; the others get one when their turn comes.

use std::time::Duration;

use super::{Pending, Room, Size};

/// The most jobs that have a promise at a time.
const MOST: usize = 64;

/// Every promise, by node.
#[derive(Debug)]
pub(super) struct Promises {
    of_nodes: Vec<Vec<(Size, Option<Duration>)>>,
    given: usize,
}

impl Promises {
    pub(super) fn new(nodes: usize) -> Promises {
        Promises { of_nodes: vec![Vec::new(); nodes], given: 0 }
    }

    /// Whether no more are given.
    pub(super) fn are_given(&self) -> bool {
        self.given >= MOST
    }

    /// Whether a job on this node delays no promised start.
    pub(super) fn leave_room(&self, index: usize, node: &Room, job: &Pending) -> bool {
        let promised = &self.of_nodes[index];
        promised.iter().all(|(_, within)| match (within, job.longest) {
            (Some(within), Some(longest)) if longest <= *within => true,
            (Some(within), _) => {
                // All jobs that were promised the node, and those that do not end before the promised start.
                let stays = node.taken.iter().filter(|taken| taken.ends.is_none_or(|ends| ends > *within));
                let promised = promised.iter().map(|(size, _)| *size);
                let all = stays.map(|taken| taken.size).chain(promised).chain([Size::of(&job.wants)]);
                let (slots, size) = all
                    .map(|asked| node.counts(asked))
                    .fold((0_u32, Size::default()), |(slots, all), size| (slots + 1, all.and(size)));
                slots <= node.slots && size.fits_into(node.size)
            }
            (None, _) => false,
        })
    }

    /// Promises a job the best of `candidates`, which are enough for it; returns the longest time from now until it
    /// can start, if known.
    pub(super) fn give(&mut self, job: &Pending, candidates: &[usize], nodes: &[Room]) -> Option<Duration> {
        if self.are_given() {
            return None;
        }
        self.given += 1;
        let mut soonest: Vec<_> = candidates
            .iter()
            .map(|i| {
                let promised = &self.of_nodes[*i];
                let (within, ends) = when(&nodes[*i], promised, Size::of(&job.wants));
                (!promised.is_empty(), within.is_none(), within, ends, *i)
            })
            .collect();
        soonest.sort_unstable();
        soonest.truncate(job.wants.nodes as usize);
        let known = soonest.iter().all(|(_, unknown, ..)| !unknown);
        let within = soonest.iter().filter_map(|(_, _, within, ..)| *within).max().filter(|_| known);
        for (.., promised) in soonest {
            // Behind a promised job whose run time is unknown there is nothing to keep free.
            if within.is_some() || self.of_nodes[promised].is_empty() {
                self.of_nodes[promised].push((Size::of(&job.wants), within));
            }
        }
        within
    }
}

/// The longest time until a node has room, if known, and how many jobs must end for it.
fn when(node: &Room, promised: &[(Size, Option<Duration>)], wants: Size) -> (Option<Duration>, usize) {
    let taken = node.taken.iter().map(|taken| (taken.ends, taken.size));
    // It is not known how long the jobs with earlier promises run.
    let before = promised.iter().map(|(size, _)| (None, *size));
    let mut uses: Vec<_> = taken.chain(before).collect();
    uses.sort_by_key(|(ends, _)| std::cmp::Reverse((ends.is_none(), *ends))); // the first to end is last
    let fits = |uses: &[(Option<Duration>, Size)]| {
        let all = uses.iter().map(|(_, size)| node.counts(*size)).sum::<Size>().and(node.counts(wants));
        uses.len() < node.slots as usize && all.fits_into(node.size)
    };
    let (mut within, mut ends) = (Some(Duration::ZERO), 0);
    while !fits(&uses) {
        let Some((first, _)) = uses.pop() else { break };
        within = within.and(first);
        ends += 1;
    }
    (within, ends)
}
