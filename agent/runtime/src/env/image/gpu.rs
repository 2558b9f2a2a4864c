//! Whether an image and a machine fit together with regard to GPUs. Pure functions.

use std::collections::{BTreeMap, HashMap};

/// The verdict.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum GpuVerdict {
    /// Nothing.
    Fine,
    /// The job continues, with a warning in its log.
    Warn(&'static str),
    /// The job cannot work there.
    Refuse(&'static str),
}

/// Judges an image that is for GPUs or not, on a machine that has GPUs or not, for a job that asks for some or not.
/// Unknown values refuse nothing.
pub fn judge_gpu(image: Option<bool>, node_has: Option<bool>, job_wants: bool) -> GpuVerdict {
    match (image, node_has, job_wants) {
        (Some(true), Some(false), _) => {
            GpuVerdict::Refuse("the image is made for GPUs, and this node has none")
        }
        (Some(false), _, true) => GpuVerdict::Warn(
            "the job asks for GPUs, but its image is made for processors alone: no GPU will be used",
        ),
        (None, _, true) => GpuVerdict::Warn(
            "the job asks for GPUs, and its image does not say that it is made for them: unless it brings the \
             libraries of CUDA, no GPU will be used",
        ),
        (Some(true), Some(true), false) => GpuVerdict::Warn(
            "the image is made for GPUs, but the job asks for none (`resources.gpus`): no GPU will be used",
        ),
        _ => GpuVerdict::Fine,
    }
}

/// A guess from the name: `nvidia/cuda:12.4`, `tool:2.1-gpu`, `tool:2.1-cpu`.
pub(super) fn of_name(reference: &str) -> Option<bool> {
    let named = reference.split('@').next().unwrap_or(reference).to_ascii_lowercase();
    let mut words = named.split(|c: char| !c.is_ascii_alphanumeric());
    if words.clone().any(|word| word == "gpu" || word.starts_with("cuda") || word.starts_with("cudnn")) {
        return Some(true);
    }
    words.any(|word| word == "cpu").then_some(false)
}

/// The image's own statement, in variables and labels.
pub(super) fn of_image(env: &BTreeMap<String, String>, labels: &HashMap<String, String>) -> Option<bool> {
    let visible = env.get("NVIDIA_VISIBLE_DEVICES").map(String::as_str);
    match visible {
        Some("void" | "none" | "") => return Some(false),
        Some(_) => return Some(true),
        None => {}
    }
    let says = ["CUDA_VERSION", "NVIDIA_REQUIRE_CUDA"].iter().any(|name| env.contains_key(*name));
    (says || labels.keys().any(|label| label.starts_with("com.nvidia."))).then_some(true)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn test_what_fits_and_what_does_not() {
        use GpuVerdict::{Fine, Refuse, Warn};
        for (image, node, wants, expected) in [
            (Some(true), Some(false), false, Refuse("made for GPUs, and this node has none")),
            (Some(true), Some(false), true, Refuse("made for GPUs, and this node has none")),
            (Some(true), Some(true), true, Fine),
            (Some(true), Some(true), false, Warn("asks for none")),
            (Some(true), None, true, Fine),
            (Some(true), None, false, Fine),
            (Some(false), Some(true), true, Warn("no GPU will be used")),
            (Some(false), Some(false), false, Fine),
            (None, Some(true), true, Warn("does not say")),
            (None, Some(true), false, Fine),
            (None, Some(false), false, Fine),
        ] {
            let verdict = judge_gpu(image, node, wants);
            let same = match (&verdict, &expected) {
                (Fine, Fine) => true,
                (Warn(said), Warn(part)) | (Refuse(said), Refuse(part)) => said.contains(part),
                _ => false,
            };
            assert!(same, "{image:?} {node:?} {wants}: {verdict:?}");
        }
    }

    #[test]
    fn test_names_and_labels_tell() {
        for (name, expected) in [
            ("nvidia/cuda:12.4", Some(true)),
            ("a/base:cuda11.1-cudnn8", Some(true)),
            ("tool:2.1-gpu", Some(true)),
            ("tool:2.1-cpu", Some(false)),
            ("ubuntu:22.04", None),
            ("barracuda:1", None),
        ] {
            assert_eq!(of_name(name), expected, "{name}");
        }
        let env = |name: &str, value: &str| BTreeMap::from([(name.to_owned(), value.to_owned())]);
        let none = HashMap::new();
        assert_eq!(of_image(&env("NVIDIA_VISIBLE_DEVICES", "all"), &none), Some(true));
        assert_eq!(of_image(&env("NVIDIA_VISIBLE_DEVICES", "void"), &none), Some(false));
        assert_eq!(of_image(&env("CUDA_VERSION", "12"), &none), Some(true));
        let label = HashMap::from([("com.nvidia.volumes.needed".to_owned(), "x".to_owned())]);
        assert_eq!(of_image(&BTreeMap::new(), &label), Some(true));
        assert_eq!(of_image(&env("PATH", "/bin"), &none), None);
    }
}
