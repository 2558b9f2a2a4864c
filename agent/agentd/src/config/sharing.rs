//! How the machine is divided among jobs.

use agent_model::node::Slots;
use agent_node::Sharing;

use super::read::Layers;
use super::{ConfigError, Setting, values};

/// Reads its keys; returns them with their settings. Three of them count only with `slots: auto`.
pub(super) fn resolve(layers: &Layers) -> Result<(Sharing, Vec<Setting>), ConfigError> {
    let [slots, job_cpus, cpus, memory] =
        layers.all(["slots", "job_cpus", "reserved_cpus", "reserved_memory"]);
    let number = |text: &str| text.parse::<u32>().ok().filter(|number| *number <= 65_536);
    let by_size = Sharing::Size {
        job_cpus: job_cpus
            .parse("a number of processors from 1 on", |text| number(text).filter(|cpus| *cpus > 0))?,
        reserved_cpus: cpus.parse("a number of processors", number)?,
        reserved_memory: memory.parse("a size such as `500MiB` or `2GB`", values::size)?,
    };
    let sharing = match slots.parse(Slots::EXPECTED, |text| text.parse().ok())? {
        Slots::Number(number) => Sharing::Slots(number),
        Slots::Auto => by_size,
    };
    Ok((sharing, vec![slots, job_cpus, cpus, memory]))
}
