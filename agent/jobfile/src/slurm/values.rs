//! The values of options of `sbatch`: times, sizes, GPUs and other jobs.

use std::time::Duration;

use agent_model::job::WantedEnd;
use agent_model::size;

use super::options::GivenOption;
use crate::section::{Rejection, Warning};

/// The longest time limit, in days: what is longer is a slip.
const LONGEST: u64 = 3650;

/// `90` (minutes), `30:00`, `2:00:00`, `1-12`, `1-12:30`, `1-12:30:00`, or a word for no limit.
pub(super) fn time(given: &GivenOption) -> Result<Option<Duration>, Rejection> {
    let text = given.value.trim();
    if ["UNLIMITED", "INFINITE", "0"].contains(&text.to_ascii_uppercase().as_str()) {
        return Ok(None);
    }
    let wrong = || {
        given
            .refuse(format!("`{text}` is no time"))
            .fix("write 90 for minutes, 2:00:00, or 1-12:00:00 with days")
    };
    let numbers = |text: &str| text.split(':').map(|part| part.parse().ok()).collect::<Option<Vec<u64>>>();
    let (days, rest) = match text.split_once('-') {
        Some((days, rest)) => (Some(days.parse::<u64>().map_err(|_| wrong())?), rest),
        None => (None, text),
    };
    let parts = numbers(rest).ok_or_else(wrong)?;
    let (hours, minutes, seconds) = match (days, parts.as_slice()) {
        (Some(_), &[hours]) => (hours, 0, 0),
        (Some(_), &[hours, minutes]) => (hours, minutes, 0),
        (None, &[minutes]) => (0, minutes, 0),
        (None, &[minutes, seconds]) => (0, minutes, seconds),
        (_, &[hours, minutes, seconds]) => (hours, minutes, seconds),
        _ => return Err(wrong()),
    };
    let days = days.unwrap_or(0);
    if [days, hours / 24, minutes / 1440, seconds / 86_400].iter().any(|days| *days > LONGEST) {
        return Err(wrong());
    }
    let all = Duration::from_secs(((days * 24 + hours) * 60 + minutes) * 60 + seconds);
    Ok((!all.is_zero()).then_some(all))
}

/// A size in megabytes, or with K, M, G or T.
pub(super) fn memory(given: &GivenOption, warnings: &mut Vec<Warning>) -> Result<u64, Rejection> {
    let text = given.value.trim();
    if text == "0" {
        let told = format!(
            "`--{}=0` asks for nothing here: without a number a job has what is left; `--memory 64g` asks for that much",
            given.option
        );
        warnings.push(Warning::new(given.place, told));
        return Ok(0);
    }
    let whole =
        if text.ends_with(|c: char| c.is_ascii_digit()) { format!("{text}m") } else { text.to_owned() };
    size::parse(&whole).ok_or_else(|| {
        given.refuse(format!("`{text}` is no size")).fix("write 4000 for megabytes, 512M, or 16G")
    })
}

/// `2`, `a100:2`, or several of the latter; how many that are.
pub(super) fn gpus(given: &GivenOption, warnings: &mut Vec<Warning>) -> Result<u32, Rejection> {
    let counts = given.value.split(',').map(|one| {
        let (kind, count) = match one.rsplit_once(':') {
            Some((kind, count)) => (Some(kind), count),
            None => (None, one),
        };
        kind.into_iter().for_each(|kind| any_kind(given, kind, warnings));
        count
            .parse::<u32>()
            .map_err(|_| given.refuse(format!("`{one}` is no number of GPUs")).fix("write 2, or KIND:2"))
    });
    counts.sum()
}

/// `gpu:2`, `gpu:a100:2` or `gpu`, among others, which have no effect; `None` where there is no GPU among them.
pub(super) fn gres(given: &GivenOption, warnings: &mut Vec<Warning>) -> Result<Option<u32>, Rejection> {
    let mut all = None;
    for one in given.value.split(',').filter(|one| !one.is_empty() && *one != "none") {
        let one = one.strip_prefix("gres/").or_else(|| one.strip_prefix("gres:")).unwrap_or(one);
        let mut parts = one.split([':', '=']);
        if parts.next() != Some("gpu") {
            let told = format!("`--gres={one}` has no effect: of generic resources only `gpu` is asked for");
            warnings.push(Warning::new(given.place, told));
            continue;
        }
        let count = match parts.collect::<Vec<_>>().as_slice() {
            [] => Some(1),
            [count] if count.starts_with(|c: char| c.is_ascii_digit()) => count.parse().ok(),
            [kind] => {
                any_kind(given, kind, warnings);
                Some(1)
            }
            [kind, count] => {
                any_kind(given, kind, warnings);
                count.parse().ok()
            }
            _ => None,
        };
        let wrong = || given.refuse(format!("`{one}` is no number of GPUs")).fix("write `--gres=gpu:2`");
        all = Some(all.unwrap_or(0_u32).saturating_add(count.ok_or_else(wrong)?));
    }
    Ok(all)
}

fn any_kind(given: &GivenOption, kind: &str, warnings: &mut Vec<Warning>) {
    let told = format!(
        "`--{}`: any GPU counts, not only {kind}; `resources: {{labels: {{KEY: VALUE}}}}` in a job file chooses machines",
        given.option
    );
    warnings.push(Warning::new(given.place, told));
}

/// `afterok:JOB:JOB,afterany:JOB`. What would make the job start at another time than was meant is refused.
pub(super) fn dependency(given: &GivenOption) -> Result<Vec<(String, WantedEnd)>, Rejection> {
    let unsupported = |what: String| {
        let fix = "write afterok:JOB, afterany:JOB or afternotok:JOB, with the names of jobs here; or use --after, \
                   --after-any or --after-failed";
        Rejection::unsupported(given.place, format!("`--dependency`: {what}"), fix)
    };
    if given.value.contains('?') {
        return Err(unsupported("one of several jobs cannot be waited for".to_owned()));
    }
    let mut all = Vec::new();
    for one in given.value.split(',').filter(|one| !one.is_empty()) {
        let (kind, jobs) = one.split_once(':').unwrap_or((one, ""));
        let end = match kind {
            "afterok" => WantedEnd::Completed,
            "afterany" => WantedEnd::Any,
            "afternotok" => WantedEnd::Failed,
            other => return Err(unsupported(format!("`{other}` is not supported"))),
        };
        let names: Vec<&str> = jobs.split(':').filter(|job| !job.is_empty()).collect();
        if names.is_empty() || names.iter().any(|job| job.contains('+')) {
            return Err(unsupported(format!("`{one}` names no job")));
        }
        all.extend(names.into_iter().map(|job| (job.to_owned(), end)));
    }
    Ok(all)
}
