//! Environments that are known by name.
//!
//! Jobs written for the cloud name environments of its registry. A node has definitions of its own for such names:
//! `NAME.yml` in a folder of its operator, else one that is shipped with the program.

/// The definitions that are shipped with the program: a name, and the environment document.
pub const SHIPPED: &[(&str, &str)] = &[
    ("sklearn-1.5", include_str!("../../../packaging/environments/sklearn-1.5.yml")),
    ("lightgbm-3.3", include_str!("../../../packaging/environments/lightgbm-3.3.yml")),
    ("tensorflow-2.16-cuda12", include_str!("../../../packaging/environments/tensorflow-2.16-cuda12.yml")),
    (
        "acpt-pytorch-2.8-cuda12.6",
        include_str!("../../../packaging/environments/acpt-pytorch-2.8-cuda12.6.yml"),
    ),
];

/// The definition that is shipped with the program for a name.
pub fn shipped(name: &str) -> Option<&'static str> {
    SHIPPED.iter().find(|(known, _)| *known == name).map(|(_, document)| *document)
}

/// The name under which an environment is looked up, in small letters and fit to be a file name; `None` for a
/// reference to no environment.
///
/// | Reference | Name |
/// |---|---|
/// | `azureml:AzureML-sklearn-1.5@latest`, `azureml:sklearn-1.5:3` | `sklearn-1.5` |
/// | `azureml://registries/REGISTRY/environments/sklearn-1.5/labels/latest` | `sklearn-1.5` |
/// | `/subscriptions/…/environments/sklearn-1.5/versions/3` | `sklearn-1.5` |
///
/// Versions and labels do not count: a node has one definition of a name.
pub fn name(reference: &str) -> Option<String> {
    let reference = reference.trim();
    let path = reference.strip_prefix("azureml:").unwrap_or(reference);
    let name = if path.starts_with('/') {
        let mut parts = path.split('/').skip_while(|part| *part != "environments");
        parts.nth(1)?
    } else {
        reference.strip_prefix("azureml:")?.split([':', '@']).next()?
    };
    let name = name.to_ascii_lowercase();
    let name = name.strip_prefix("azureml-").unwrap_or(&name);
    let plain = |c: char| c.is_ascii_alphanumeric() || "._-".contains(c);
    let fit = name.starts_with(|c: char| c.is_ascii_alphanumeric()) && name.chars().all(plain);
    (fit && name.len() <= 128).then(|| name.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn test_references_become_names() {
        for (reference, expected) in [
            ("azureml:AzureML-sklearn-1.5@latest", Some("sklearn-1.5")),
            ("azureml:azureml-sklearn-1.5:27", Some("sklearn-1.5")),
            ("azureml:AzureML-acpt-pytorch-2.8-cuda12.6@latest", Some("acpt-pytorch-2.8-cuda12.6")),
            ("azureml:My_Env", Some("my_env")),
            ("azureml://registries/azureml/environments/sklearn-1.5/labels/latest", Some("sklearn-1.5")),
            (
                "azureml://registries/azureml/environments/AzureML-lightgbm-3.3/versions/9",
                Some("lightgbm-3.3"),
            ),
            ("/subscriptions/s/resourceGroups/g/x/workspaces/w/environments/e/versions/1", Some("e")),
            ("azureml://registries/azureml/models/m/versions/1", None),
            ("azureml:../../etc/passwd:1", None),
            ("azureml:.hidden@latest", None),
            ("azureml:AzureML-@latest", None),
            ("azureml://registries/r/environments/", None),
            ("azureml:", None),
            ("sklearn-1.5", None),
            ("", None),
        ] {
            assert_eq!(name(reference).as_deref(), expected, "{reference}");
        }
    }
}
