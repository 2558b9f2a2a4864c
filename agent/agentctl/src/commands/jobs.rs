//! `jobs`: lists the jobs that wait, run or have ended.

use agent_model::{Clock, Code, SystemClock, Timestamp};
use agent_proto::v1;
use serde_json::json;
use tokio::time::{Duration, Instant, sleep};

use super::view::JobView;
use crate::cli::JobsArgs;
use crate::client::{Client, Target, answer, person};
use crate::failure::Failure;
use crate::output::table::{Cell, Table};
use crate::output::text::{Tone, age, duration};
use crate::output::{Output, Paper};

/// Jobs asked for at a time.
const PAGE: u32 = 500;
/// Time between two queries of `--watch`.
const BETWEEN: Duration = Duration::from_secs(1);
/// How long to wait for a daemon that is away.
const AWAY: Duration = Duration::from_secs(60);

/// Lists jobs, newest first.
pub(super) async fn jobs(args: &JobsArgs, to: Option<&Target>, output: &mut Output) -> Result<(), Failure> {
    let client = Client::find(to).await?;
    let limit = if args.all { u32::MAX } else { args.limit };
    let own = args.mine.then(|| person(&client.own()));
    let meant = |job: &JobView| {
        own.as_ref().is_none_or(|own| job.owner == *own)
            && job.is_such(args.state.as_deref(), args.experiment.as_deref())
    };
    if let Some(array) = &args.array {
        return of_array(&client, array, args, limit, meant, output).await;
    }
    if args.watch {
        return watch(&client, output, async |paper| {
            let (jobs, _) = list(&client, limit, args.active, meant).await?;
            Ok(match jobs.is_empty() {
                true => "no jobs\n".to_owned(),
                false => table(&jobs, SystemClock.now(), paper),
            })
        })
        .await;
    }
    let (jobs, more) = list(&client, limit, args.active, meant).await?;
    if args.json {
        return output.json(&json!({ "jobs": jobs, "more": more }));
    }
    if jobs.is_empty() {
        output.note(match args.mine || args.active || args.state.is_some() || args.experiment.is_some() {
            true => "no job is such a one; `agentctl jobs` lists those of every kind",
            false => "no jobs; submit one with `agentctl run DIR -- python train.py`",
        });
        return Ok(());
    }
    let paper = output.paper();
    output.print(&table(&jobs, SystemClock.now(), paper))?;
    if more {
        output.note("older jobs are not shown: --limit N or --all shows them");
    }
    Ok(())
}

/// Lists the tasks of an array, by their indices.
async fn of_array(
    client: &Client,
    given: &str,
    args: &JobsArgs,
    limit: u32,
    meant: impl Fn(&JobView) -> bool,
    output: &mut Output,
) -> Result<(), Failure> {
    let array = JobView::try_from(client.job(given).await?)?;
    let Some(stand) = &array.tasks else {
        let fix = format!("see it: agentctl show {}", array.job);
        return Err(Failure::refused(format!("{} is no array", array.job), fix));
    };
    let look = async || -> Result<_, Failure> {
        let (mut found, more) = tasks(client, &array.job, limit, args.active, &meant).await?;
        found.sort_by_key(|task| task.index);
        Ok((found, more))
    };
    if args.watch {
        return watch(client, output, async |paper| Ok(table(&look().await?.0, SystemClock.now(), paper)))
            .await;
    }
    let (found, more) = look().await?;
    if args.json {
        return output.json(&json!({ "array": array, "jobs": found, "more": more }));
    }
    let paper = output.paper();
    output.print(&table(&found, SystemClock.now(), paper))?;
    output.note(&format!("{} {}: {}", array.job, array.state, stand.counts()));
    if !stand.waiting.is_empty() {
        output.note(&format!("not started: {}", stand.waiting));
    }
    if more {
        output.note("tasks that were started earlier are not shown: --limit N or --all shows them");
    }
    Ok(())
}

/// Shows a text again whenever it changed. Ends when the reader closes the output, or when the daemon stays away.
pub(super) async fn watch(
    client: &Client,
    output: &mut Output,
    look: impl AsyncFn(Paper) -> Result<String, Failure>,
) -> Result<(), Failure> {
    let mut shown = String::new();
    loop {
        match look(output.paper()).await {
            Ok(text) => {
                if text != shown {
                    output.print_anew(&text)?;
                    shown = text;
                }
            }
            Err(Failure::Fault(fault)) if fault.code == Code::Unreachable => {
                if !client.until_back(Instant::now() + AWAY).await {
                    return Err(Failure::Fault(fault));
                }
            }
            Err(failure) => return Err(failure),
        }
        sleep(BETWEEN).await;
    }
}

/// At most `limit` jobs that are `meant`, and whether there may be more.
pub(super) async fn list(
    client: &Client,
    limit: u32,
    active: bool,
    meant: impl Fn(&JobView) -> bool,
) -> Result<(Vec<JobView>, bool), Failure> {
    tasks(client, "", limit, active, meant).await
}

/// The same of the tasks of an array that have a record; with an empty name, of the jobs that are no tasks.
pub(super) async fn tasks(
    client: &Client,
    array: &str,
    limit: u32,
    active: bool,
    meant: impl Fn(&JobView) -> bool,
) -> Result<(Vec<JobView>, bool), Failure> {
    let mut jobs: Vec<JobView> = Vec::new();
    let (mut after, mut wanted) = (String::new(), limit.min(PAGE));
    loop {
        let request = v1::ListJobsRequest { limit: wanted, active, after, array: array.to_owned() };
        let page = answer(client.jobs().list(request)).await?;
        wanted = PAGE; // where there was too little, most jobs are not meant
        let Some(last) = page.jobs.last() else { return Ok((jobs, false)) };
        after = last.job.clone();
        for job in page.jobs {
            jobs.push(JobView::try_from(job)?);
            jobs.pop_if(|job| !meant(job));
        }
        let enough = jobs.len() >= limit as usize;
        let more = page.more || jobs.len() > limit as usize;
        jobs.truncate(limit as usize);
        if enough || !page.more {
            return Ok((jobs, more));
        }
    }
}

/// Jobs as a table.
pub(super) fn table(jobs: &[JobView], now: Timestamp, paper: Paper) -> String {
    // The owner is shown only if there are several.
    let several = jobs.iter().any(|job| job.owner != jobs[0].owner);
    let owner: &[&str] = if several { &["OWNER"] } else { &[] };
    let columns = [&["NAME", "STATE", "AGE", "DURATION", "EXIT"], owner, &["TITLE"]].concat();
    let names: &[usize] = if several { &[0, 5] } else { &[0] };
    let mut table = Table::new(&columns, &[2, 3, 4]).with_names(names);
    for job in jobs {
        let stands = job.tasks.as_ref().map(|tasks| tasks.counts());
        let title = match job.state.as_str() {
            _ if stands.is_some() => format!("{} ({})", job.title, stands.unwrap_or_default()),
            "Queued" if !job.detail.is_empty() => format!("{} ({})", job.title, job.detail),
            "Preparing" | "Finalizing" if !job.work().is_empty() => format!("{} ({})", job.title, job.work()),
            _ => job.title.clone(),
        };
        let mut row = vec![
            Cell::from(&job.job),
            Cell::new(job.tone(), &job.state),
            Cell::from(age(Timestamp(job.submitted_ms), now)),
            Cell::from(job.duration(now).map(duration).unwrap_or_default()),
            exit_cell(job),
        ];
        row.extend(several.then(|| Cell::from(&job.owner)));
        row.push(Cell::from(title));
        table.row(row);
    }
    table.render(paper)
}

fn exit_cell(job: &JobView) -> Cell {
    match job.exit_code {
        Some(0) => Cell::from("0"),
        Some(code) => Cell::new(Tone::Bad, code.to_string()),
        None => Cell::default(),
    }
}

#[cfg(test)]
mod tests {
    use super::super::view::tests::{ended, failed};
    use super::*;
    use crate::output::text::Ink;

    #[test]
    fn test_table_fits_80_columns() {
        let mut waiting = failed();
        waiting.state = "Queued".into();
        (waiting.outcome, waiting.exit_code, waiting.started_ms) = (None, None, None);
        waiting.detail = "1 job ahead, both slots of box busy: train-a, train-b".into();
        let paper = Paper { ink: Ink::PLAIN, width: 80 };
        insta::assert_snapshot!(table(&[waiting, failed(), ended()], Timestamp(1_200_000), paper), @r"
            NAME     STATE        AGE  DURATION  EXIT  TITLE
            train-1  Queued     3 min                  python t.py (1 job ahead, both slots…
            train-1  Failed     3 min     0.4 s     3  python t.py
            train-1  Completed  3 min      12 s     0  python t.py
        ");
        let long = |name: &str, owner: &str| super::super::view::JobView {
            job: name.into(),
            owner: owner.into(),
            title: "python train.py --epochs 100 --learning-rate 0.001".into(),
            ..ended()
        };
        let mut silent =
            long("resnet50-imagenet-large-batch-warmup-cosine-x7k2p", "somebody-with-a-long-name@lab");
        silent.state = "NotResponding".into();
        let jobs = [silent, long("resnet50-imagenet-large-batch-warmup-linear-q3m9z", "ada")];
        insta::assert_snapshot!(table(&jobs[..1], Timestamp(1_200_000), paper), @r"
            NAME                      STATE            AGE  DURATION  EXIT  TITLE
            resnet50-ima…osine-x7k2p  NotResponding  3 min      12 s     0  python train.py…
        ");
        insta::assert_snapshot!(table(&jobs, Timestamp(1_200_000), paper), @r"
            NAME                STATE            AGE  DURATION  EXIT  OWNER
            resnet50-…ne-x7k2p  NotResponding  3 min      12 s     0  somebody-…name@lab
            resnet50-…ar-q3m9z  Completed      3 min      12 s     0  ada
        ");
        let theirs = super::super::view::JobView { owner: "eve".into(), ..ended() };
        insta::assert_snapshot!(table(&[theirs, ended()], Timestamp(1_200_000), paper), @r"
            NAME     STATE        AGE  DURATION  EXIT  OWNER  TITLE
            train-1  Completed  3 min      12 s     0  eve    python t.py
            train-1  Completed  3 min      12 s     0  root   python t.py
        ");
    }
}
