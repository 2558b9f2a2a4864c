//! What an environment installs, whatever its files are called.
//!
//! The node caches an environment under [`normalized`], to which it adds its platform and interpreter.

use agent_model::EnvSpec;

use crate::condafile;

/// A text that is equal for two specifications that mean the same environment.
///
/// Requirement lines keep their order where it matters to pip (options first, then packages sorted). Names of
/// files, names of environments, and variables are left out: they change no package.
pub fn normalized(spec: &EnvSpec) -> String {
    match spec {
        EnvSpec::Pip { python, requirements } => {
            let lines: Vec<&str> = requirements.iter().map(String::as_str).collect();
            format!("pip\n{python}\n{}", pip_lines(&lines))
        }
        EnvSpec::Conda { document, lock, .. } => conda(document, lock.as_deref()),
        other => serde_json::to_string(other).unwrap_or_default(), // strings and enums always serialise
    }
}

/// A short summary for people: `conda.yml: python=3.11, scikit-learn and 3 more`.
pub fn summary(spec: &EnvSpec) -> String {
    match spec {
        EnvSpec::Host { python, requirements } if requirements.is_empty() => format!("{python} as it is"),
        EnvSpec::Host { python, requirements } => {
            format!("{python} as it is, with {}", few(requirements))
        }
        EnvSpec::Pip { python, requirements } if requirements.is_empty() => python.clone(),
        EnvSpec::Pip { python, requirements } => format!("{python}: {}", few(requirements)),
        EnvSpec::Conda { file, document, lock } => {
            let what = conda_summary(document, lock.as_deref());
            match file.strip_prefix("./").unwrap_or(file) {
                "" => what,
                file => format!("{file}: {what}"),
            }
        }
        EnvSpec::Image { image, conda: None } => image.clone(),
        EnvSpec::Image { image, conda: Some(document) } => {
            format!("{image}: {}", conda_summary(document, None))
        }
        EnvSpec::Build { dockerfile, .. } => format!("built from {dockerfile}"),
        EnvSpec::Named { reference } => reference.clone(),
    }
}

/// Options in their order, then packages, sorted, each once.
fn pip_lines(lines: &[&str]) -> String {
    let (mut options, mut packages): (Vec<_>, Vec<_>) =
        lines.iter().map(|line| line.trim()).partition(|line| line.starts_with('-'));
    options.dedup();
    packages.sort_unstable();
    packages.dedup();
    format!("{}\n{}", options.join("\n"), packages.join("\n"))
}

/// The part of a conda environment that counts: a lock alone if there is one, because it leaves nothing to choose.
fn conda(document: &str, lock: Option<&str>) -> String {
    if let Some(text) = lock {
        let Ok(mut lock) = condafile::parse_lock(text) else { return format!("conda\nlock\n{text}") };
        lock.packages.sort_by(|a, b| a.url.cmp(&b.url));
        return format!("conda\nlock\n{lock}");
    }
    let Ok((file, _)) = condafile::parse(document) else { return format!("conda\n{document}") };
    let texts = |lines: &[condafile::Line]| lines.iter().map(|line| line.text.clone()).collect::<Vec<_>>();
    let pip = texts(&file.pip);
    let pip: Vec<&str> = pip.iter().map(String::as_str).collect();
    let (channels, specs) = (texts(&file.channels), file.normalized_specs());
    format!("conda\n{}\n\n{}\n\n{}", channels.join("\n"), specs.join("\n"), pip_lines(&pip))
}

fn conda_summary(document: &str, lock: Option<&str>) -> String {
    let count = |count: usize, what: &str| match count {
        0 => None,
        1 => Some(format!("1 {what}")),
        _ => Some(format!("{count} {what}s")),
    };
    match (condafile::parse(document), lock.map(condafile::parse_lock)) {
        (Ok((file, _)), None) => file.to_string(),
        (Ok((file, _)), Some(_)) => format!("{file}, locked"),
        (Err(_), Some(Ok(lock))) => {
            let parts = [count(lock.packages.len(), "exact package"), count(lock.pip.len(), "pip package")];
            parts.into_iter().flatten().collect::<Vec<_>>().join(", ")
        }
        (Err(_), _) => "a conda environment".to_owned(),
    }
}

fn few(requirements: &[String]) -> String {
    let packages = requirements.iter().map(String::as_str).filter(|line| !line.starts_with('-'));
    condafile::listed(&packages.collect::<Vec<_>>())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pip(lines: &[&str]) -> String {
        let requirements = lines.iter().map(|l| (*l).to_owned()).collect();
        normalized(&EnvSpec::Pip { python: "python3".into(), requirements })
    }

    #[test]
    fn test_order_of_packages_does_not_matter_but_options_do() {
        assert_eq!(pip(&["numpy", "scipy==1.2"]), pip(&["scipy==1.2", "numpy", "numpy"]));
        assert_ne!(pip(&["numpy"]), pip(&["numpy==2"]));
        assert_ne!(pip(&["--pre", "numpy"]), pip(&["numpy"]));
        assert_ne!(pip(&["-i a", "-f b"]), pip(&["-f b", "-i a"]));
    }

    fn conda(file: &str, document: &str, lock: Option<&str>) -> EnvSpec {
        EnvSpec::Conda { file: file.into(), document: document.into(), lock: lock.map(str::to_owned) }
    }

    const LOCK: &str = "@EXPLICIT\nhttps://h/c/noarch/b-1-0.conda\nhttps://h/c/noarch/a-1-0.conda#";

    #[test]
    fn test_conda_environments_are_equal_by_what_they_install() {
        let one = conda(
            "a.yml",
            "name: a\nchannels: [x, y]\ndependencies: [python=3.11, NumPy, pip, pip: [b, a]]\n",
            None,
        );
        let same = "# b\nname: b\ndependencies:\n- numpy\n- pip\n- python = 3.11\n- pip:\n  - a\n  - b\n\
                    channels:\n- x\n- y\nvariables: {A: 1}\n";
        assert_eq!(normalized(&one), normalized(&conda("b.yml", same, None)));
        for other in [
            same.replace("- x\n- y", "- y\n- x"),
            same.replace("3.11", "3.12"),
            same.replace("  - b\n", ""),
            same.replace("  - a\n", "  - --pre\n  - a\n"),
        ] {
            assert_ne!(normalized(&one), normalized(&conda("b.yml", &other, None)), "{other}");
        }
        assert_ne!(normalized(&conda("", "a: [", None)), normalized(&conda("", "b: [", None)));
    }

    #[test]
    fn test_a_lock_alone_decides_what_is_installed() {
        let lock = format!("{LOCK}{}\n", "ab".repeat(16));
        let reordered = format!(
            "# made today\n@EXPLICIT\nhttps://h/c/noarch/a-1-0.conda#{}\nhttps://h/c/noarch/b-1-0.conda\n",
            "AB".repeat(16)
        );
        let locked = normalized(&conda("a.yml", "dependencies: [a]", Some(&lock)));
        assert_eq!(locked, normalized(&conda("", "", Some(&reordered))));
        assert_ne!(locked, normalized(&conda("a.yml", "dependencies: [a]", None)));
        assert_ne!(locked, normalized(&conda("", "", Some("@EXPLICIT\nhttps://h/c/noarch/b-1-0.conda\n"))));
    }

    #[test]
    fn test_summaries_are_short() {
        let lines = |lines: &[&str]| lines.iter().map(|line| (*line).to_owned()).collect::<Vec<_>>();
        let python = || "python3".to_owned();
        let long = "dependencies: [scikit-learn, python=3.11, pip, a, b, c, pip: [d, --pre, e]]";
        let lock = format!("{LOCK}{}\n# pip six==1\n", "ab".repeat(16));
        for (spec, expected) in [
            (
                conda("./conda.yml", long, None),
                "conda.yml: python=3.11, scikit-learn and 3 more, 2 pip packages",
            ),
            (
                conda("c.yml", "dependencies: [python, pip, x, y, pip: [d]]", None),
                "c.yml: python, x, y, 1 pip package",
            ),
            (conda("", "dependencies: [r-base]", Some(&lock)), "r-base, locked"),
            (conda("env.lock", "", Some(&lock)), "env.lock: 2 exact packages, 1 pip package"),
            (conda("c.yml", "[", None), "c.yml: a conda environment"),
            (EnvSpec::host(), "python3 as it is"),
            (EnvSpec::Host { python: python(), requirements: lines(&["a"]) }, "python3 as it is, with a"),
            (EnvSpec::Pip { python: python(), requirements: lines(&["--pre", "a", "b"]) }, "python3: a, b"),
            (EnvSpec::Image { image: "ubuntu".into(), conda: None }, "ubuntu"),
            (EnvSpec::Named { reference: "azureml:a:1".into() }, "azureml:a:1"),
        ] {
            assert_eq!(summary(&spec), expected);
        }
    }
}
