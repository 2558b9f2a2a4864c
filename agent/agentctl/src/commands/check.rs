//! `check`: everything that is wrong with job files, without sending anything.

use std::fmt::Write;
use std::path::Path;
use std::process::ExitCode;

use serde_json::{Value, json};

use crate::cli::CheckArgs;
use crate::failure::Failure;
use crate::output::Output;
use crate::output::text::{clean, count};
use crate::prepare::{Findings, Mistake, Remark, check};

/// Reads each target; the exit code says whether all of them could run.
pub(super) fn files(args: &CheckArgs, output: &mut Output) -> Result<ExitCode, Failure> {
    let found: Vec<(&Path, Findings)> =
        args.targets.iter().map(|target| (target.as_path(), check(target))).collect();
    let good = |(_, found): &(&Path, Findings)| is_good(found, args.strict);
    let all = found.iter().all(good);
    match args.json {
        true => output.json(&document(&found, args.strict))?,
        false => {
            output.print(&found.iter().map(|(target, found)| render(target, found)).collect::<String>())?
        }
    }
    Ok(if all { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

fn is_good(found: &Findings, strict: bool) -> bool {
    found.mistakes.is_empty() && (!strict || found.warnings.is_empty())
}

/// Each finding in a line, as compilers print them, and a sum.
fn render(target: &Path, found: &Findings) -> String {
    let mut text = String::new();
    // Writing to a string cannot fail.
    for Mistake { code, file, place, message, fix } in &found.mistakes {
        let file = file.as_ref().map(|file| format!("{}: ", file.display())).unwrap_or_default();
        let place = place.map(|place| format!("{place}: ")).unwrap_or_default();
        let _ = writeln!(text, "error[{code}]: {}", clean(&format!("{file}{place}{message}")));
        if let Some(fix) = fix {
            let _ = writeln!(text, "  fix: {}", clean(fix));
        }
    }
    for warning in &found.warnings {
        let _ = writeln!(text, "warning: {}", clean(&warning.to_string()));
    }
    let mistakes = match found.mistakes.len() {
        0 => "no mistakes".to_owned(),
        number => count(number as u64, "mistake"),
    };
    let warnings = match found.warnings.len() {
        0 => String::new(),
        number => format!(", {}", count(number as u64, "warning")),
    };
    let _ = writeln!(text, "{}: {mistakes}{warnings}", clean(&target.display().to_string()));
    text
}

/// See `agent/docs/json.md`.
fn document(found: &[(&Path, Findings)], strict: bool) -> Value {
    let mistake = |mistake: &Mistake| {
        json!({
            "code": mistake.code,
            "file": mistake.file,
            "line": mistake.place.map(|place| place.line),
            "column": mistake.place.map(|place| place.column),
            "message": mistake.message,
            "fix": mistake.fix,
        })
    };
    let warning = |warning: &Remark| {
        json!({
            "file": warning.file,
            "line": warning.place.map(|place| place.line),
            "column": warning.place.map(|place| place.column),
            "message": warning.message,
        })
    };
    let target = |(target, found): &(&Path, Findings)| {
        json!({
            "target": target,
            "ok": is_good(found, strict),
            "mistakes": found.mistakes.iter().map(mistake).collect::<Vec<_>>(),
            "warnings": found.warnings.iter().map(warning).collect::<Vec<_>>(),
        })
    };
    json!({ "targets": found.iter().map(target).collect::<Vec<_>>() })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn test_findings_are_lines_and_a_sum() {
        let place = Some(agent_jobfile::yaml::Place { line: 2, column: 5 });
        let mistake = Mistake {
            code: "JOB-102",
            file: Some("job.yml".into()),
            place,
            message: "`x` is wrong".into(),
            fix: Some("write y".into()),
        };
        let warning = Remark { file: "job.yml".into(), place, message: "`z` has no effect".into() };
        let found = Findings { mistakes: vec![mistake], warnings: vec![warning] };
        insta::assert_snapshot!(render(Path::new("."), &found), @r"
            error[JOB-102]: job.yml: line 2, column 5: `x` is wrong
              fix: write y
            warning: job.yml: line 2, column 5: `z` has no effect
            .: 1 mistake, 1 warning
        ");
        insta::assert_snapshot!(render(Path::new("p"), &Findings::default()), @"p: no mistakes");
        assert!(!is_good(&found, false) && is_good(&Findings::default(), true));
        let warned = Findings { mistakes: Vec::new(), ..found };
        assert!(is_good(&warned, false) && !is_good(&warned, true));
    }
}
