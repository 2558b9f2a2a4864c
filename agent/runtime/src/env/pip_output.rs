//! pip's output when packages are not installed, and what it means.

use std::path::Path;

use super::AcquireError;
use super::build_workspace::Ran;

/// Replaces pip's references to lines of a file, which only the builder knows, by the lines themselves.
pub(super) fn name_lines(text: &str, list: &str, requirements: &[String]) -> String {
    requirements.iter().enumerate().fold(text.to_owned(), |text, (index, requirement)| {
        let place = format!("-r {list} (line {})", index + 1);
        text.replace(&format!(" (from {place})"), "").replace(&place, requirement)
    })
}

/// Signs in pip's output that an index cannot be reached; pip may then also print that no package was found.
const UNREACHABLE: [&str; 7] = [
    "NewConnectionError",
    "ConnectTimeoutError",
    "ReadTimeoutError",
    "ProxyError",
    "NameResolutionError",
    "SSLError",
    "connection broken by",
];

/// Why packages were not installed, from pip's output.
pub(super) fn judge(ran: &Ran, step: &'static str, prefix: &Path) -> AcquireError {
    let lines = || ran.text.lines().map(str::trim);
    let errors = || lines().filter_map(|line| line.strip_prefix("ERROR: "));
    if agent_fs::says_full(&ran.text) {
        return AcquireError::DiskFull { path: prefix.to_owned() };
    }
    if let Some(lack) = ran.lack(step) {
        return lack;
    }
    if let Some(line) = lines().rfind(|line| UNREACHABLE.iter().any(|sign| line.contains(sign))) {
        return AcquireError::Network { detail: line.to_owned() };
    }
    if let Some(requirement) =
        errors().find_map(|line| line.strip_prefix("No matching distribution found for "))
    {
        let reason = errors().find(|line| line.starts_with("Could not find a version"));
        let detail = reason.unwrap_or("no version of it was found").to_owned();
        return AcquireError::Unsatisfied { requirement: requirement.to_owned(), detail };
    }
    if let Some(line) = errors().find(|line| line.starts_with("Cannot install ")) {
        let packages = line.trim_start_matches("Cannot install ").split(" because ").next().unwrap_or(line);
        let detail = "their requirements exclude each other".to_owned();
        return AcquireError::Unsatisfied {
            requirement: packages.to_owned(),
            detail: conflict(lines(), detail),
        };
    }
    if let Some(line) = errors().find(|line| line.contains("requires a different Python")) {
        let package = line.split_whitespace().nth(1).unwrap_or(line).trim_matches('\'').to_owned();
        return AcquireError::Unsatisfied { requirement: package, detail: line.to_owned() };
    }
    AcquireError::Failed { step, detail: ran.tail() }
}

/// The lines below `The conflict is caused by:`, if they are there.
fn conflict<'a>(lines: impl Iterator<Item = &'a str>, otherwise: String) -> String {
    let causes = lines.skip_while(|line| *line != "The conflict is caused by:").skip(1);
    let causes: Vec<&str> = causes.take_while(|line| !line.is_empty()).collect();
    if causes.is_empty() { otherwise } else { causes.join(", ") }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn judge(text: &str) -> AcquireError {
        super::judge(&Ran { success: false, text: text.to_owned() }, "installing", Path::new("/env"))
    }

    #[test]
    fn test_output_of_pip_is_understood() {
        let missing = "ERROR: Could not find a version that satisfies the requirement nope==9 (from versions: 1, 2)\n\
                       ERROR: No matching distribution found for nope==9\n";
        let AcquireError::Unsatisfied { requirement, detail } = judge(missing) else { panic!() };
        assert_eq!(requirement, "nope==9");
        assert!(detail.contains("from versions: 1, 2"), "{detail}");

        let offline = format!(
            "WARNING: Retrying (Retry(total=4)) after connection broken by 'NewConnectionError(...)': /simple/x/\n{missing}"
        );
        assert!(matches!(judge(&offline), AcquireError::Network { .. }));

        let conflict = "ERROR: Cannot install a==1 and b==2 because these package versions have conflicting \
                        dependencies.\n\nThe conflict is caused by:\n    a 1 depends on c==1\n    b 2 depends on c==2\n\n\
                        To fix this\n";
        let AcquireError::Unsatisfied { requirement, detail } = judge(conflict) else { panic!() };
        assert_eq!(requirement, "a==1 and b==2");
        assert_eq!(detail, "a 1 depends on c==1, b 2 depends on c==2");

        let python = "ERROR: Package 'x' requires a different Python: 3.8.1 not in '>=3.13'\n";
        assert!(matches!(judge(python), AcquireError::Unsatisfied { requirement, .. } if requirement == "x"));

        let full =
            "ERROR: Could not install packages due to an OSError: [Errno 28] No space left on device\n";
        assert!(matches!(judge(full), AcquireError::DiskFull { .. }));

        let other = "one\n\nerror: subprocess-exited-with-error\n";
        assert!(matches!(judge(other), AcquireError::Failed { detail, .. }
            if detail == "one | error: subprocess-exited-with-error"));
    }

    #[test]
    fn test_lines_of_the_list_are_named() {
        let lines = ["nope==9".to_owned(), "other".to_owned()];
        let text = "for nope==9 (from -r list (line 1))\ninstall -r list (line 1) and -r list (line 2)";
        let named = name_lines(text, "list", &lines);
        assert_eq!(named, "for nope==9\ninstall nope==9 and other");
    }
}
