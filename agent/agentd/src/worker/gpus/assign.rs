//! Chooses the GPUs for a job: one pure function.
//!
//! Invariants, checked by property tests: no GPU that is held, unfit or without an identifier is given, and none
//! twice; a job gets exactly as many as it wants or none; the same input gives the same result.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;

use agent_model::ReplicaId;
use agent_model::node::Gpu;

/// Why a job is not given its GPUs now.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Wait {
    wanted: u32,
    free: usize,
    /// Why the others are not free, as text for users.
    others: Vec<String>,
}

impl Wait {
    /// There is no recent look at the GPUs.
    pub(super) fn unseen(wanted: u32) -> Wait {
        Wait { wanted, free: 0, others: vec!["the GPUs have not been looked at yet".to_owned()] }
    }
}

impl fmt::Display for Wait {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let s = if self.wanted == 1 { "" } else { "s" };
        write!(f, "waiting for {} GPU{s}, {} free", self.wanted, self.free)?;
        match self.others.is_empty() {
            true => Ok(()),
            false => write!(f, ": {}", self.others.join("; ")),
        }
    }
}

/// Gives `wanted` of `gpus`, by their identifiers in the order of the driver.
///
/// Prefers GPUs of one kind; of several sufficient kinds the one with the least memory, so that large GPUs are left
/// for jobs that need them. A job that wants more than one gets parts of divided GPUs only if nothing else is left: a
/// process can use only one part.
pub(crate) fn assign(
    gpus: &[Gpu],
    held: &BTreeMap<String, ReplicaId>,
    wanted: u32,
) -> Result<Vec<String>, Wait> {
    let count = usize::try_from(wanted).unwrap_or(usize::MAX);
    let mut seen = BTreeSet::new();
    let mut free: Vec<&Gpu> = gpus
        .iter()
        .filter(|gpu| gpu.unfit.is_none() && !gpu.uuid.is_empty() && !held.contains_key(&gpu.uuid))
        .filter(|gpu| seen.insert(&gpu.uuid))
        .collect();
    if free.len() < count {
        return Err(Wait { wanted, free: free.len(), others: others(gpus, held) });
    }
    let part = |gpu: &Gpu| wanted > 1 && is_part(gpu);
    free.sort_by_key(|gpu| (part(gpu), gpu.index, &gpu.uuid));
    let mut kinds: BTreeMap<(bool, u64, &str), Vec<&Gpu>> = BTreeMap::new();
    for &gpu in &free {
        kinds.entry((part(gpu), gpu.memory, &gpu.name)).or_default().push(gpu);
    }
    let of_one_kind = kinds.into_values().find(|kind| kind.len() >= count);
    let mut given = of_one_kind.unwrap_or(free);
    given.truncate(count);
    given.sort_by_key(|gpu| (gpu.index, &gpu.uuid));
    Ok(given.into_iter().map(|gpu| gpu.uuid.clone()).collect())
}

/// Whether it is a part of a divided GPU.
fn is_part(gpu: &Gpu) -> bool {
    gpu.uuid.starts_with("MIG-")
}

fn others(gpus: &[Gpu], held: &BTreeMap<String, ReplicaId>) -> Vec<String> {
    const SHOWN: usize = 4;
    if gpus.is_empty() {
        return vec!["this node has none".to_owned()];
    }
    let why = |gpu: &Gpu| match (&gpu.unfit, held.get(&gpu.uuid)) {
        (Some(unfit), _) => Some(format!("GPU {}: {unfit}", gpu.index)),
        (None, Some(replica)) => Some(format!("GPU {} is used by {}", gpu.index, replica.job)),
        (None, None) => None,
    };
    let mut others: Vec<String> = gpus.iter().filter_map(why).collect();
    // GPUs that are unused but not handed out are listed first: an operator can do something about them.
    others.sort_by_key(|other| other.contains(" is used by "));
    if others.len() > SHOWN {
        let more = others.len() - SHOWN;
        others.truncate(SHOWN);
        others.push(format!("and {more} more"));
    }
    others
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn gpu(index: u32, uuid: &str, memory: u64) -> Gpu {
        Gpu { index, uuid: uuid.into(), name: format!("card of {memory}"), memory, ..Gpu::default() }
    }

    fn held(names: &[(&str, &str)]) -> BTreeMap<String, ReplicaId> {
        names.iter().map(|(uuid, replica)| ((*uuid).to_owned(), replica.parse().unwrap())).collect()
    }

    #[test]
    fn test_kinds_are_not_mixed_and_the_small_go_first() {
        let gpus = [gpu(0, "a", 80), gpu(1, "b", 16), gpu(2, "c", 80), gpu(3, "MIG-d", 10)];
        let given = |wanted| assign(&gpus, &BTreeMap::new(), wanted).unwrap();
        assert_eq!(given(0), Vec::<String>::new());
        assert_eq!(given(1), ["MIG-d"]);
        assert_eq!(given(2), ["a", "c"]);
        assert_eq!(given(3), ["a", "b", "c"]);
        assert_eq!(given(4), ["a", "b", "c", "MIG-d"]);
    }

    #[test]
    fn test_wait_says_what_is_in_the_way() {
        let mut gpus = [gpu(0, "a", 80), gpu(1, "b", 80), gpu(2, "c", 80)];
        gpus[2].unfit = Some("it is lost".into());
        let wait = |gpus: &[Gpu], wanted| assign(gpus, &held(&[("a", "train.1.0")]), wanted).unwrap_err();
        assert_eq!(
            wait(&gpus, 2).to_string(),
            "waiting for 2 GPUs, 1 free: GPU 2: it is lost; GPU 0 is used by train"
        );
        assert_eq!(wait(&[], 1).to_string(), "waiting for 1 GPU, 0 free: this node has none");
        let many: Vec<Gpu> = (0..9).map(|n| Gpu { unfit: Some("x".into()), ..gpu(n, "u", 1) }).collect();
        assert!(wait(&many, 1).to_string().ends_with("GPU 3: x; and 5 more"), "{}", wait(&many, 1));
    }

    proptest! {
        #[test]
        fn test_nothing_is_given_twice_and_the_answer_is_always_the_same(
            cards in prop::collection::vec((0u8..12, 0u64..3, any::<bool>(), any::<bool>(), any::<bool>()), 0..16),
            wanted in 0u32..10,
        ) {
            // Invalid input too: duplicate identifiers, and empty ones.
            let gpus: Vec<Gpu> = cards.iter().enumerate().map(|(i, (name, memory, part, unfit, _))| {
                let uuid = match (name, part) {
                    (0, _) => String::new(),
                    (name, true) => format!("MIG-{name}"),
                    (name, false) => format!("GPU-{name}"),
                };
                let index = u32::try_from(i).unwrap();
                Gpu { unfit: unfit.then(|| "it is broken".into()), ..gpu(index, &uuid, *memory) }
            }).collect();
            let held: BTreeMap<String, ReplicaId> = gpus.iter().zip(&cards)
                .filter(|(_, card)| card.4)
                .map(|(gpu, _)| (gpu.uuid.clone(), "a.1.0".parse().unwrap()))
                .collect();
            let fit = |uuid: &String| {
                !uuid.is_empty() && !held.contains_key(uuid)
                    && gpus.iter().any(|gpu| gpu.uuid == *uuid && gpu.unfit.is_none())
            };
            let free: BTreeSet<&String> = gpus.iter().map(|gpu| &gpu.uuid).filter(|uuid| fit(uuid)).collect();
            match assign(&gpus, &held, wanted) {
                Ok(given) => {
                    prop_assert_eq!(given.len(), wanted as usize);
                    let distinct: BTreeSet<&String> = given.iter().collect();
                    prop_assert_eq!(distinct.len(), given.len());
                    prop_assert!(given.iter().all(fit));
                    prop_assert_eq!(assign(&gpus, &held, wanted), Ok(given));
                }
                Err(_) => prop_assert!(free.len() < wanted as usize),
            }
        }
    }
}
