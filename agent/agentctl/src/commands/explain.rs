//! `explain`: the page of a fault code.

use agent_model::Code;
use serde_json::json;

use crate::failure::Failure;
use crate::output::table::{Cell, Table};
use crate::output::text::{Tone, wrap};
use crate::output::{Output, Paper};

/// Prints one page, or the list of all codes.
pub(super) fn explain(code: Option<&str>, json: bool, output: &mut Output) -> Result<(), Failure> {
    let paper = output.paper();
    let Some(text) = code else {
        let entry = |code: Code| json!({ "code": code.as_str(), "title": code.title() });
        return match json {
            true => output.json(&Code::ALL.iter().copied().map(entry).collect::<Vec<_>>()),
            false => output.print(&list(paper)),
        };
    };
    let code = Code::parse(text.trim()).ok_or_else(|| {
        Failure::refused(
            format!("there is no fault code `{text}`"),
            "codes look like ENV-103; `agentctl explain` lists them all",
        )
    })?;
    if json {
        return output.json(&json!({ "code": code.as_str(), "title": code.title(), "page": page(code) }));
    }
    output.print(&render(page(code), paper))
}

fn list(paper: Paper) -> String {
    let mut table = Table::new(&["CODE", "MEANS"], &[]);
    for code in Code::ALL {
        table.row([Cell::new(Tone::Strong, code.as_str()), Cell::from(code.title())]);
    }
    table.render(paper)
}

/// A page with its paragraphs and items fitted to the paper and its headings set off.
fn render(page: &str, paper: Paper) -> String {
    let width = paper.width.min(90);
    let mut blocks: Vec<String> = Vec::new();
    for line in page.lines() {
        let begins = line.is_empty() || line.starts_with(['#', '-']);
        match blocks.last_mut().filter(|last| !begins && !last.is_empty() && !last.starts_with('#')) {
            Some(last) => {
                last.push(' ');
                last.push_str(line.trim_start());
            }
            None => blocks.push(line.to_owned()),
        }
    }
    let fit = |block: &String| match block.split_once(' ') {
        Some(("#" | "##", heading)) => paper.ink.paint(Tone::Strong, heading).into_owned(),
        Some(("-", _)) => wrap(block, width, 2),
        _ => wrap(block, width, 0),
    };
    blocks.iter().map(|block| fit(block) + "\n").collect()
}

macro_rules! page {
    ($code:literal) => {
        include_str!(concat!("../../../docs/faults/", $code, ".md"))
    };
}

/// The page of a code. A code without one does not compile.
#[allow(clippy::too_many_lines, reason = "a line for each code")]
fn page(code: Code) -> &'static str {
    match code {
        Code::JobFile => page!("JOB-101"),
        Code::JobInvalid => page!("JOB-102"),
        Code::JobUnsupported => page!("JOB-103"),
        Code::JobNotFound => page!("JOB-104"),
        Code::JobConflict => page!("JOB-105"),
        Code::JobActive => page!("JOB-106"),
        Code::JobNotWaiting => page!("JOB-107"),
        Code::JobNeverDue => page!("JOB-108"),
        Code::SessionRefused => page!("JOB-109"),
        Code::TasksFailed => page!("JOB-110"),
        Code::JobTooLarge => page!("JOB-111"),
        Code::MetricMissing => page!("JOB-112"),
        Code::SnapshotUnreadable => page!("SNP-101"),
        Code::SnapshotUnsafe => page!("SNP-102"),
        Code::SnapshotMissing => page!("SNP-103"),
        Code::SnapshotStore => page!("SNP-104"),
        Code::SnapshotDamaged => page!("SNP-105"),
        Code::DataUnknown => page!("DAT-101"),
        Code::DataAbsent => page!("DAT-102"),
        Code::DataDenied => page!("DAT-103"),
        Code::DataRefused => page!("DAT-104"),
        Code::DataUnreachable => page!("DAT-105"),
        Code::DataDamaged => page!("DAT-106"),
        Code::DataNode => page!("DAT-107"),
        Code::AssetUnknown => page!("DAT-108"),
        Code::AssetInvalid => page!("DAT-109"),
        Code::OutputRefused => page!("DAT-110"),
        Code::OutputUnsent => page!("DAT-111"),
        Code::PythonMissing => page!("ENV-101"),
        Code::PythonIncomplete => page!("ENV-102"),
        Code::EnvUnsatisfied => page!("ENV-103"),
        Code::EnvBuild => page!("ENV-104"),
        Code::EnvUnsupported => page!("ENV-105"),
        Code::EnvNetwork => page!("ENV-106"),
        Code::EnvDenied => page!("ENV-107"),
        Code::EnvDamaged => page!("ENV-108"),
        Code::EnvLacks => page!("ENV-109"),
        Code::EnvUnknown => page!("ENV-110"),
        Code::EnvInUse => page!("ENV-111"),
        Code::ImageMissing => page!("ENV-112"),
        Code::ImageBuild => page!("ENV-113"),
        Code::ImageCarrier => page!("ENV-114"),
        Code::ImagePlatform => page!("ENV-115"),
        Code::CommandFailed => page!("RUN-101"),
        Code::CommandNotFound => page!("RUN-102"),
        Code::CommandSignaled => page!("RUN-103"),
        Code::OutOfMemory => page!("RUN-104"),
        Code::TimeLimit => page!("RUN-105"),
        Code::LaunchFailed => page!("RUN-106"),
        Code::RunLost => page!("RUN-107"),
        Code::Unkilled => page!("RUN-108"),
        Code::OutputsUnstored => page!("OUT-101"),
        Code::DiskFull => page!("NODE-101"),
        Code::NodeLost => page!("NODE-102"),
        Code::NodeRebooted => page!("NODE-103"),
        Code::LeaseOver => page!("NODE-104"),
        Code::NodeUnknown => page!("NODE-105"),
        Code::NodeAnswers => page!("NODE-106"),
        Code::GpuLost => page!("NODE-107"),
        Code::GangIncomplete => page!("GANG-101"),
        Code::GangUnreachable => page!("GANG-102"),
        Code::GangLate => page!("GANG-103"),
        Code::GangUnlike => page!("GANG-104"),
        Code::GangPlace => page!("GANG-105"),
        Code::NodeTwice => page!("NODE-108"),
        Code::NodeBusy => page!("NODE-109"),
        Code::NodeTaken => page!("NODE-110"),
        Code::NodeRemoved => page!("NODE-112"),
        Code::Preempted => page!("NODE-111"),
        Code::NodeUnfit => page!("NODE-113"),
        Code::ControllerStore => page!("CTL-101"),
        Code::Fenced => page!("CTL-102"),
        Code::RequestInvalid => page!("CTL-103"),
        Code::Unreachable => page!("NET-101"),
        Code::Denied => page!("NET-102"),
        Code::Unidentified => page!("NET-103"),
        Code::TokenRefused => page!("NET-104"),
        Code::ClocksApart => page!("NET-105"),
        Code::NotKnownHere => page!("NET-106"),
        Code::NoListener => page!("NET-107"),
        Code::NameUsed => page!("NET-108"),
        Code::ConfigInvalid => page!("CFG-101"),
        Code::StateInUse => page!("CFG-102"),
        Code::StateUnusable => page!("CFG-103"),
        Code::JoinedElsewhere => page!("CFG-104"),
        Code::HostLogin => page!("SSH-101"),
        Code::HostKey => page!("SSH-102"),
        Code::HostUnfit => page!("SSH-103"),
        Code::HostUnfinished => page!("SSH-104"),
        Code::Bug => page!("BUG-001"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::output::text::Ink;

    const PAPER: Paper = Paper { ink: Ink::PLAIN, width: 60 };

    #[test]
    fn test_every_page_is_its_own_and_says_what_to_do() {
        for code in Code::ALL {
            let page = page(*code);
            assert!(page.starts_with(&format!("# {code}: {}\n", code.title())), "{code}");
            for part in ["## What it means", "## Why it happens", "## What to do"] {
                assert!(page.contains(part), "{code} lacks `{part}`");
            }
        }
    }

    #[test]
    fn test_page_fits_the_paper() {
        let shown = render(
            "# ENV-103: a title\n\n- a long item that must be broken into two lines to fit here\n",
            PAPER,
        );
        insta::assert_snapshot!(shown, @r"
            ENV-103: a title

            - a long item that must be broken into two lines to fit
              here
        ");
    }

    #[test]
    fn test_list_names_every_code() {
        let list = list(PAPER);
        assert!(Code::ALL.iter().all(|code| list.contains(code.as_str())));
    }
}
