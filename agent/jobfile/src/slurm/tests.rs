use super::*;

/// What a script asks for, as one line: what is as usual is left out.
fn asked(text: &str) -> Result<(String, Vec<String>), String> {
    let script =
        batch_script(text, "script").map_err(|refused| agent_model::Fault::from(refused).to_string())?;
    let BatchScript { draft, after, directory, exported, begin, deadline, warnings } = script;
    let wants = &draft.resources;
    let mut told = Vec::new();
    let mut add = |name: &str, value: String| told.push(format!("{name}={value}"));
    if !draft.display_name.is_empty() {
        add("name", draft.display_name.clone());
    }
    draft.array.iter().for_each(|array| add("array", array.to_string()));
    draft.limits.timeout.iter().for_each(|limit| add("time", limit.as_secs().to_string()));
    for (name, number) in [("nodes", wants.nodes - 1), ("gpus", wants.gpus), ("cpus", wants.cpus)] {
        if number > 0 {
            add(name, if name == "nodes" { number + 1 } else { number }.to_string());
        }
    }
    if wants.memory > 0 {
        add("memory", agent_model::size::binary(wants.memory));
    }
    draft.compute.iter().for_each(|pool| add("pool", pool.clone()));
    after.iter().for_each(|(job, end)| add("after", format!("{job}/{}", end.name())));
    directory.iter().for_each(|directory| add("in", directory.clone()));
    begin.iter().for_each(|(_, begin)| add("begin", begin.clone()));
    deadline.iter().for_each(|(_, deadline)| add("deadline", deadline.clone()));
    exported.iter().for_each(|name| add("export", name.clone()));
    for (name, value) in &draft.environment_variables {
        let usual = name == JOB_NAME || (name == "SLURM_NTASKS_PER_NODE" && value == "1");
        if !usual {
            add(name.strip_prefix("SLURM_").unwrap_or(name), value.clone());
        }
    }
    Ok((
        told.join(" "),
        warnings.iter().map(|warning| format!("{}: {}", warning.place, warning.message)).collect(),
    ))
}

fn script(lines: &[&str]) -> String {
    let lines: Vec<String> = lines.iter().map(|line| format!("#SBATCH {line}\n")).collect();
    format!("#!/bin/bash\n{}\npython train.py\n", lines.concat())
}

#[test]
fn test_scripts_ask_for_what_slurm_would_give_them() {
    for (lines, expected) in [
        // One process.
        (&["--job-name=mnist", "--time=01:00:00", "--gres=gpu:1"][..], "name=mnist time=3600 gpus=1"),
        (
            &["-J bert", "-t 2-12:00:00", "-c 8", "--mem=64G", "--gres=gpu:a100:2"],
            "name=bert time=216000 gpus=2 cpus=8 memory=64 GiB CPUS_PER_TASK=8",
        ),
        (&["-Jshort", "-t90", "-c4", "-N1", "-n1"], "name=short time=5400 cpus=4 CPUS_PER_TASK=4"),
        (&["-J joined -t 30:00 --mem 4000"], "name=joined time=1800 memory=3.9 GiB"),
        (&["--job-name=\"two words\"  # a comment", "--time=1-0"], "name=two words time=86400"),
        (&["--time=UNLIMITED", "--mem=512M"], "memory=512 MiB"),
        (&["--time=1-06:30"], "time=109800"),
        (&["--time=10", "--time=20"], "time=1200"),
        // Arrays.
        (&["--array=0-15%4", "--time=15"], "array=0-15%4 time=900"),
        (&["-a 1,3,5-9:2", "--mem-per-cpu=2G"], "array=1-9:2 memory=2 GiB MEM_PER_CPU=2048"),
        // Several processes on one machine.
        (&["--ntasks=16", "--mem-per-cpu=1G"], "cpus=16 memory=16 GiB MEM_PER_CPU=1024 NTASKS_PER_NODE=16"),
        (
            &["--ntasks=4", "--cpus-per-task=8", "--gpus-per-task=1"],
            "gpus=4 cpus=32 CPUS_PER_TASK=8 GPUS_PER_TASK=1 NTASKS_PER_NODE=4",
        ),
        (&["--gpus=4", "--cpus-per-gpu=12", "--mem-per-gpu=40G"], "gpus=4 cpus=48 memory=160 GiB"),
        (&["--gpus=v100:2"], "gpus=2"),
        (&["--gres=gpu"], "gpus=1"),
        (&["--gres=gpu:2,shard:1"], "gpus=2"),
        // Several machines.
        (&["--nodes=2", "--ntasks-per-node=1", "--gpus-per-node=8"], "nodes=2 gpus=8 cpus=1"),
        (
            &["-N 4", "--ntasks-per-node=4", "--gres=gpu:4", "--cpus-per-task=10", "--exclusive"],
            "nodes=4 gpus=4 cpus=40 CPUS_PER_TASK=10 NTASKS_PER_NODE=4",
        ),
        (&["--nodes=2", "--ntasks=8"], "nodes=2 cpus=4 NTASKS_PER_NODE=4"),
        (&["--ntasks=8", "--ntasks-per-node=4"], "nodes=2 cpus=4 NTASKS_PER_NODE=4"),
        (&["--nodes=2-4", "--gpus=4"], "nodes=2 gpus=2"),
        (&["--nodes=2", "--ntasks=2", "--ntasks-per-node=8"], "nodes=2 cpus=1"),
        // Where, when, and with what.
        (&["-p gpu-long", "-A physics", "--qos=high"], "pool=gpu-long"),
        (&["--partition=a100,v100"], "pool=a100"),
        (
            &["--dependency=afterok:prep:split,afterany:clean"],
            "after=prep/completed after=split/completed after=clean/any",
        ),
        (&["-d afternotok:train"], "after=train/failed"),
        (&["--export=ALL,WANDB_MODE=offline,DATA"], "export=DATA WANDB_MODE=offline"),
        (&["--export=NONE", "--get-user-env"], ""),
        (&["--chdir=experiments/a/"], "in=experiments/a"),
        (&["-D ."], ""),
        (&["-b 22:00 --deadline=2026-12-01T08:00"], "begin=22:00 deadline=2026-12-01T08:00"),
        (&["--mem=0", "--exclusive"], ""),
        (&["--mail-type=END,FAIL", "--mail-user=ada@lab.example"], ""),
        (&["--signal=B:USR1@120", "--requeue", "--open-mode=append"], ""),
    ] {
        let (told, _) = asked(&script(lines)).unwrap_or_else(|fault| panic!("{lines:?}: {fault}"));
        assert_eq!(told, expected, "{lines:?}");
    }
}

#[test]
fn test_what_has_no_effect_is_named_with_its_place_and_what_to_do() {
    for (line, expected) in [
        (
            "--output=logs/%x-%j.out --error=logs/%x-%j.err",
            &["`--output` has no effect: what the script prints is in `agentctl logs JOB`"][..],
        ),
        (
            "--mail-type=ALL --mail-user=ada@lab.example",
            &["`--mail-type` has no effect: nobody is sent mail"],
        ),
        ("--constraint=a100", &["`--constraint` has no effect: machines are chosen by their labels"]),
        ("--gres=gpu:h100:1", &["`--gres`: any GPU counts, not only h100"]),
        ("--gres=gpu:1,lustre:1", &["`--gres=lustre:1` has no effect"]),
        ("--partition=a,b", &["`--partition`: a job names one pool, so a counts and not b"]),
        ("--account=x --qos=y", &["`--account` has no effect: jobs are counted for the user"]),
        ("--mem=0", &["`--mem=0` asks for nothing here"]),
        ("--nodes=1-3", &["`--nodes=1-3`: the job is given 1"]),
        ("--export=ALL", &["`--export=ALL` sends none of your variables"]),
        ("--chdir=/scratch/x", &["`--chdir=/scratch/x` has no effect"]),
        ("--chdir=../x", &["`--chdir=../x` has no effect"]),
        ("--container-image=nvcr.io/x", &["`--container-image` has no effect: name the image in a job file"]),
        (
            "--gpu-per-node=2",
            &["`--gpu-per-node` is not known and has no effect; did you mean `--gpus-per-node`?"],
        ),
        ("--frobnicate 3 --time=1", &["`--frobnicate` is not known and has no effect"]),
        ("-Z", &["`-Z` is not known"]),
        ("stray", &["`stray` is not known"]),
        ("--exclusive=user --nice=100", &["`--exclusive` has no effect", "`--nice` has no effect"]),
        ("--hint=nomultithread -v --open-mode=truncate --comment='a b' -O", &[]),
    ] {
        let (_, told) = asked(&script(&[line])).unwrap();
        assert_eq!(told.len(), expected.len(), "{line}: {told:?}");
        for (told, expected) in told.iter().zip(expected) {
            assert!(told.starts_with("line 2, column ") && told.contains(expected), "{line}: {told}");
        }
    }
    let (_, told) = asked("#!/bin/bash\n#SBATCH -c 2\nmodule load cuda/12\nmodule load gcc\n").unwrap();
    assert!(
        told.len() == 1 && told[0].starts_with("line 3, column 1: `module load cuda/12` works only"),
        "{told:?}"
    );
    let (_, told) = asked("#!/bin/bash\n#SBATCH  -c 2   --foo\n").unwrap();
    assert_eq!(told, ["line 2, column 17: `--foo` is not known and has no effect"]);
}

#[test]
fn test_values_that_would_make_another_job_are_refused() {
    for (line, expected) in [
        ("--time=soon", "line 2, column 9: `--time`: `soon` is no time"),
        ("--time=1:2:3:4", "`--time`: `1:2:3:4` is no time"),
        ("--time=99999-0", "is no time"),
        ("--mem=lots", "`--mem`: `lots` is no size"),
        ("--nodes=0", "`--nodes`: `0` is no number"),
        ("--ntasks", "`--ntasks`: `` is no number"),
        ("--array=9-1", "`--array`: "),
        ("--gres=gpu:a:b:c", "`--gres`: `gpu:a:b:c` is no number of GPUs"),
        ("--gpus=many", "`--gpus`: `many` is no number of GPUs"),
        ("--nodes=2 --gpus=3", "`--gpus`: 3 are not the same number on each of 2 nodes"),
        ("--ntasks=6 --ntasks-per-node=4", "`--ntasks`: 6 tasks are not the same number on each of 2 nodes"),
        ("--nodes=2 --ntasks=5", "`--ntasks`: 5 tasks are not the same number on each of 2 nodes"),
        ("--dependency=singleton", "`--dependency`: `singleton` is not supported"),
        ("--dependency=afterok:a?afterok:b", "one of several jobs cannot be waited for"),
        ("--dependency=afterok", "`afterok` names no job"),
        ("--dependency=afterok:12+5", "`afterok:12+5` names no job"),
    ] {
        let fault = asked(&script(&[line])).unwrap_err();
        assert!(fault.contains(expected), "{line}: {fault}");
    }
    let both = batch_script(&script(&["--time=x", "--mem=y"]), "x").unwrap_err();
    assert_eq!(both.mistakes.len(), 2, "all mistakes are told at once");
}

#[test]
fn test_only_lines_before_the_first_command_count() {
    let text = "#!/usr/bin/env python3\r\n# a word\r\n\r\n#SBATCH --gres=gpu:2\r\n##SBATCH --time=1\r\n# SBATCH \
                --time=2\r\n#SBATCHED\r\nimport torch\r\n#SBATCH --time=3\r\n";
    assert!(is_batch_script(text));
    assert_eq!(asked(text).unwrap(), ("gpus=2".to_owned(), Vec::new()));
    for other in ["#!/bin/bash\necho\n#SBATCH -c 2\n", "#!/bin/bash\n# SBATCH -c 2\n", "command: x\n", ""] {
        assert!(!is_batch_script(other), "{other}");
    }
}

#[test]
fn test_a_node_learns_from_the_variables_that_it_is_a_batch_script() {
    let variables = |text: &str| batch_script(text, "train.sh").unwrap().draft.environment_variables;
    assert_eq!(variables(&script(&["-c 2"]))[JOB_NAME], "train.sh");
    assert_eq!(variables(&script(&["-J a"]))[JOB_NAME], "a");
    // What somebody exports counts less.
    assert_eq!(variables(&script(&["-J a --export=SLURM_JOB_NAME=b"]))[JOB_NAME], "a");
}
