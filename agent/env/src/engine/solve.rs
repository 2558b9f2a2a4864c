//! Chooses the packages of an environment.
//!
//! Owns the solver's task and the explanation of its refusal for the author of the specifications. Hides the solver.
//!
//! Invariants: choosing ends within its time; a refusal names the lines that caused it, as far as they are known.

use std::sync::Arc;
use std::time::Duration;

use agent_env::{Build, Failure, FailureKind, Phase, Priority};
use rattler_conda_types::RepoDataRecord;
use rattler_repodata_gateway::RepoData;
use rattler_solve::resolvo::Solver;
use rattler_solve::{ChannelPriority, SolveError, SolverImpl, SolverTask};

use agent_model::words::count;

use super::specs::{Asked, Wanted, lines};
use super::tell::{Teller, busy};
use super::{Advise, Done, failed};

/// Lines of a refusal that are shown.
const SHOWN: usize = 40;

/// The packages of an environment.
pub(crate) async fn choose(
    wanted: Wanted,
    offers: Vec<RepoData>,
    build: &Build,
    teller: &Arc<Teller>,
) -> Done<Vec<RepoDataRecord>> {
    teller.mark(busy(Phase::Solve, format!("for {}", count(wanted.specs.len() as u64, "specification"))));
    let within = Duration::from_secs(build.solve_within_s.max(1));
    let priority = match build.priority {
        Priority::Strict => ChannelPriority::Strict,
        Priority::Flexible => ChannelPriority::Flexible,
    };
    let Wanted { specs, virtual_packages, asked, .. } = wanted;
    let solved = tokio::task::spawn_blocking(move || {
        let task = SolverTask {
            specs,
            virtual_packages,
            timeout: Some(within),
            channel_priority: priority,
            ..offers.iter().collect::<SolverTask<'_, Vec<_>>>()
        };
        Solver.solve(task).map(|solved| solved.records)
    });
    match solved.await {
        Ok(Ok(records)) => Ok(records),
        Ok(Err(error)) => Err(explain(error, &asked, within, build)),
        Err(error) => Err(failed(FailureKind::Other, format!("the solver failed: {error}"))),
    }
}

fn explain(error: SolveError, asked: &[Asked], within: Duration, build: &Build) -> Failure {
    match error {
        SolveError::Unsolvable(reasons) => {
            refusal(&reasons.join("\n"), asked, &build.platform.virtual_packages)
        }
        SolveError::Cancelled => failed(
            FailureKind::TooLong,
            format!("no choice of packages was found within {} s", within.as_secs()),
        )
        .advise("Say more exactly which versions are wanted, above all of python; that leaves less to try."),
        other => failed(FailureKind::Other, format!("the solver failed: {other}")),
    }
}

/// The failure for a refusal of the solver.
fn refusal(tree: &str, asked: &[Asked], offered: &[String]) -> Failure {
    let tree = tree.trim().trim_start_matches("Cannot solve the request because of:").trim();
    let mut message = String::from("no choice of packages satisfies everything:\n");
    for line in tree.lines().take(SHOWN) {
        message.push_str(line.trim_end());
        message.push('\n');
    }
    let more = tree.lines().count().saturating_sub(SHOWN);
    if more > 0 {
        message.push_str(&format!("(and {} more)\n", count(more as u64, "line")));
    }
    let mut failure = failed(FailureKind::Unsatisfiable, message.trim_end());
    failure.lines = lines(asked.iter().filter(|spec| names(tree, &spec.name)).map(|spec| spec.line));
    match hint(tree, asked, offered) {
        Some(hint) => failure.advise(hint),
        None => failure,
    }
}

fn hint(tree: &str, asked: &[Asked], offered: &[String]) -> Option<String> {
    let exact = asked.iter().find(|spec| names(tree, &spec.name) && is_short_exact(&spec.text));
    if let Some(spec) = exact {
        let loose = spec.text.replacen("==", "=", 1);
        return Some(format!(
            "`{}` means exactly that version and no other; `{loose}` means any that begins so.",
            spec.text
        ));
    }
    for (package, lacking) in [
        ("__cuda", "this machine offers no CUDA driver"),
        ("__glibc", "the C library of this machine is another"),
        ("__archspec", "the processor of this machine is another"),
    ] {
        if names(tree, package) {
            let found = offered.iter().find(|text| text.starts_with(&format!("{package}=")));
            let found = found.map_or_else(|| "none".to_owned(), |text| format!("`{text}`"));
            return Some(format!("A package needs `{package}`, and {lacking} (it has {found})."));
        }
    }
    let absent = asked.iter().find(|spec| {
        tree.contains(&format!("No candidates were found for {}", spec.name))
            && !spec.text.contains(['=', '<', '>', ' '])
    });
    absent.map(|spec| format!("No channel has a package `{}` for this platform: check its spelling, or add the channel that has it. Packages of PyPI belong below `pip:`.", spec.name))
}

/// Whether it is like `name==1.2`: with fewer parts than versions have.
fn is_short_exact(text: &str) -> bool {
    text.split_once("==").is_some_and(|(_, version)| {
        version.trim().split('.').count() < 3
            && version.trim().chars().all(|c| c.is_ascii_digit() || c == '.')
    })
}

/// Whether a text contains this package name, and not only a longer name around it.
fn names(text: &str, name: &str) -> bool {
    let part = |c: char| c.is_alphanumeric() || matches!(c, '-' | '_' | '.');
    text.match_indices(name).any(|(at, _)| {
        let before = text[..at].chars().next_back();
        let mut after = text[at + name.len()..].chars();
        let next = after.next();
        // A full stop may end a sentence.
        let ends = match next {
            Some('.') => after.next().is_none_or(|c| !part(c)),
            Some(c) => !part(c),
            None => true,
        };
        before.is_none_or(|c| !part(c)) && ends
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn asked(specs: &[(&str, &str, usize)]) -> Vec<Asked> {
        specs
            .iter()
            .map(|(name, text, line)| Asked { name: (*name).into(), text: (*text).into(), line: *line })
            .collect()
    }

    #[test]
    fn test_a_refusal_names_the_lines_it_is_about() {
        let tree = "Cannot solve the request because of: scikit-learn * cannot be installed because there are no viable options:\n└─ scikit-learn 1.9.1 would require\n   └─ python >=3.11, which cannot be installed\n";
        let asked =
            asked(&[("scikit-learn", "scikit-learn", 5), ("python", "python=3.8", 4), ("learn", "learn", 9)]);
        let failure = refusal(tree, &asked, &[]);
        assert_eq!((failure.kind, failure.lines), (FailureKind::Unsatisfiable, vec![4, 5]));
        assert!(
            failure.message.starts_with("no choice of packages satisfies everything:\nscikit-learn * cannot")
        );
    }

    #[test]
    fn test_hints() {
        let python = asked(&[("python", "python==3.11", 3)]);
        let hint = |tree: &str, asked: &[Asked], offered: &[&str]| {
            let offered: Vec<String> = offered.iter().map(|text| (*text).to_owned()).collect();
            refusal(tree, asked, &offered).hint.unwrap_or_default()
        };
        assert!(
            hint("No candidates were found for python ==3.11.", &python, &[])
                .contains("`python=3.11` means any")
        );
        let torch = asked(&[("torch", "torch", 3)]);
        let text = hint(
            "torch * would require\n └─ __cuda >=12, for which no candidates were found.",
            &torch,
            &["__glibc=2.36=0"],
        );
        assert!(text.contains("CUDA driver (it has none)"), "{text}");
        assert!(hint("No candidates were found for torch *.", &torch, &[]).contains("spelling"));
        assert_eq!(hint("something else", &torch, &[]), "");
    }

    #[test]
    fn test_long_refusals_are_cut() {
        let tree = (0..100).map(|n| format!("line {n}\n")).collect::<String>();
        let failure = refusal(&tree, &[], &[]);
        assert!(failure.message.ends_with("(and 60 lines more)"));
    }
}
