//! `envs show`: everything about one environment.

use agent_jobfile::condafile::{Lock, parse_lock};
use agent_model::{Clock, SystemClock, Timestamp, size};
use serde_json::json;

use super::{KeptEnvironment, found};
use crate::cli::EnvArgs;
use crate::client::{Client, Target};
use crate::failure::Failure;
use crate::output::text::{Tone, ago, clean, count, moment, wrap};
use crate::output::{Output, Paper};

/// Lines of the build log that are shown.
const TAIL: usize = 15;

/// Shows one environment.
pub(super) async fn show(args: &EnvArgs, to: Option<&Target>, output: &mut Output) -> Result<(), Failure> {
    let client = Client::find(to).await?;
    let one = found(&client, args).await?;
    let lock = match one.lock {
        // A lock of a later release is shown as far as it is understood.
        Some(digest) => parse_lock(&client.text(digest).await?).ok(),
        None => None,
    };
    let log = match one.log {
        Some(digest) => client.text(digest).await?,
        None => String::new(),
    };
    let packages = lock.as_ref().map(packages).unwrap_or_default();
    if args.json {
        let mut document = serde_json::to_value(&one).unwrap_or_default(); // our own plain struct
        document["package_list"] = json!(packages);
        return output.json(&document);
    }
    let paper = output.paper();
    output.print(&render(&one, &packages, &log, SystemClock.now(), paper))
}

/// The packages of a lock by their usual names, as `numpy-1.26.4-py311h64a7726_0`, and those that pip installed.
fn packages(lock: &Lock) -> Vec<String> {
    let name = |url: &str| {
        let file = url.rsplit('/').next().unwrap_or(url);
        let plain = file.strip_suffix(".conda").or_else(|| file.strip_suffix(".tar.bz2")).unwrap_or(file);
        plain.to_owned()
    };
    let pip = |line: &String| {
        let short = line.split(" --hash").next().unwrap_or(line).split(" @ ").next().unwrap_or(line);
        format!("{} (pip)", short.trim())
    };
    lock.packages.iter().map(|package| name(&package.url)).chain(lock.pip.iter().map(pip)).collect()
}

fn render(one: &KeptEnvironment, packages: &[String], log: &str, now: Timestamp, paper: Paper) -> String {
    let view = &one.view;
    let since = |ms: u64| format!("{} ({})", moment(Timestamp(ms)), ago(Timestamp(ms), now));
    let mut facts = vec![
        ("key", view.key.clone()),
        ("node", one.node.clone()),
        ("made of", view.summary.clone()),
        ("python", view.python.clone().unwrap_or_default()),
        ("size", format!("{}, {}", size::binary(view.bytes), count(view.packages.into(), "package"))),
        ("built", since(view.built_ms)),
        ("last used", since(view.used_ms)),
    ];
    let uses = match (view.uses, view.pinned) {
        (0, false) => "nobody; it may be removed to make room".to_owned(),
        (0, true) => "nobody; it is pinned, so it stays".to_owned(),
        (uses, _) => count(uses.into(), "job"),
    };
    facts.push(("used by", uses));
    let mut text = String::new();
    for (label, value) in facts.iter().filter(|(_, value)| !value.is_empty()) {
        let label = paper.ink.paint(Tone::Strong, &format!("{label:<10}")).into_owned();
        text.push_str(&format!("{label} {}\n", wrap(&clean(value), paper.width, 11)));
    }
    let section = |title: &str| format!("\n{}\n", paper.ink.paint(Tone::Strong, title));
    if !packages.is_empty() {
        text.push_str(&section("packages"));
        packages.iter().for_each(|package| text.push_str(&format!("  {}\n", clean(package))));
    }
    let lines: Vec<&str> = log.lines().collect();
    if !lines.is_empty() {
        text.push_str(&section("end of the build log"));
        for line in &lines[lines.len().saturating_sub(TAIL)..] {
            text.push_str(&format!("  {}\n", clean(line)));
        }
    }
    text
}

#[cfg(test)]
mod tests {
    use super::super::tests::one;
    use super::*;
    use crate::output::text::Ink;

    #[test]
    fn test_everything_is_shown() {
        let lock = parse_lock(
            "# platform: linux-64\n@EXPLICIT\n\
             https://host/c/linux-64/numpy-1.26.4-py311_0.conda#sha256:0000000000000000000000000000000000000000000000000000000000000000\n\
             # pip click==8.1.7 --hash=sha256:0000000000000000000000000000000000000000000000000000000000000000\n",
        )
        .unwrap();
        let packages = packages(&lock);
        assert_eq!(packages, ["numpy-1.26.4-py311_0", "click==8.1.7 (pip)"]);
        let log: String = (0..20).map(|n| format!("line {n}\x1b[2J\n")).collect();
        let paper = Paper { ink: Ink::PLAIN, width: 80 };
        let shown = render(&one("box", "conda-3f0a"), &packages, &log, Timestamp(1_180_000), paper);
        insta::assert_snapshot!("text", shown);
    }
}
