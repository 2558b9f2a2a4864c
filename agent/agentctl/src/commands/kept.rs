//! What nodes keep of jobs because it is stored nowhere else, and how to free that room.

use agent_model::node::Finding;
use agent_model::size;

use super::view::NodeView;
use crate::client::person;
use crate::output::text::clean;

/// Replicas that are named of a node.
const SHOWN: usize = 5;

/// A line for each node that keeps something, without its name.
pub(super) fn line(node: &NodeView) -> Option<String> {
    let kept = &node.inventory.kept;
    let all: u64 = kept.iter().map(|kept| kept.bytes).sum();
    let mut largest: Vec<_> = kept.iter().collect();
    largest.sort_by_key(|kept| std::cmp::Reverse(kept.bytes));
    let first = largest.first()?.replica.job.clone();
    let named = largest.iter().take(SHOWN).map(|kept| {
        let owner = if kept.owner.is_empty() {
            String::new()
        } else {
            format!(" of {}", clean(&person(&kept.owner)))
        };
        format!("{}{owner} {}", kept.replica.job, size::binary(kept.bytes))
    });
    let mut named: Vec<String> = named.collect();
    let more = largest.len().saturating_sub(SHOWN);
    named.extend((more > 0).then(|| format!("and {more} more")));
    Some(format!(
        "{} of jobs that ended, stored nowhere else: {}; store it: agentctl node outputs {first}; or let it go: agentctl \
         rm {first}",
        size::binary(all),
        named.join(", ")
    ))
}

/// The same as a finding about the machine.
pub(super) fn finding(node: &NodeView) -> Option<Finding> {
    let bytes: u64 = node.inventory.kept.iter().map(|kept| kept.bytes).sum();
    let first = &node.inventory.kept.first()?.replica.job;
    Some(Finding::limited(
        "results",
        format!("{} of jobs that ended are kept, because they are stored nowhere else", size::binary(bytes)),
        "they take room until they are stored, or seven days are over; `agentctl gc` lists them",
        format!("`agentctl node outputs {first}` stores them; or `agentctl rm {first}` lets them go"),
    ))
}

#[cfg(test)]
mod tests {
    use agent_model::node::KeptResult;

    use super::super::nodes::tests::small;
    use super::*;

    #[test]
    fn test_what_is_kept_is_listed_by_job_and_owner_the_largest_first() {
        let mut node = small();
        assert_eq!(line(&node), None);
        let kept = |job: &str, owner: &str, bytes| KeptResult {
            replica: format!("{job}.1.0").parse().unwrap(),
            owner: owner.into(),
            bytes,
        };
        node.inventory.kept = vec![kept("small", "", 1 << 10), kept("large", "ada", 3 << 29)];
        assert_eq!(
            line(&node).unwrap(),
            "1.5 GiB of jobs that ended, stored nowhere else: large of ada 1.5 GiB, small 1 KiB; store it: agentctl node \
             outputs large; or let it go: agentctl rm large"
        );
    }
}
