//! Batch scripts of Slurm, as people bring them.

use agent_tests::Host;

#[test]
fn test_a_batch_script_of_slurm_runs_as_it_stands() {
    let host = Host::started();
    let script = "#!/bin/bash -l\n#SBATCH --job-name=mnist\n#SBATCH --ntasks=2 --cpus-per-task=1 --mem=64M\n\
                  #SBATCH --output=%x-%j.out  # told\n#SBATCH --frobnicate=7\n\n\
                  echo \"$SLURM_JOB_NAME $SLURM_NTASKS $SLURM_MEM_PER_NODE $(basename \"$PWD\") $1\"\n\
                  test $((SLURM_JOB_ID % 10)) -ge 0 && test \"$SLURM_SUBMIT_DIR\" = \"$PWD\"\n\
                  srun bash -c 'echo \"process $SLURM_PROCID of $SLURM_NTASKS\"' | sort\n\
                  scontrol show hostnames \"$SLURM_JOB_NODELIST\"\n";
    let dir = host.project("p", &[("jobs/train.slurm", script), ("data.txt", "x")]);
    let file = dir.join("jobs/train.slurm");
    let ran = host.ctl(&["run", file.to_str().unwrap(), "--", "word"]).ok();
    assert_eq!(ran.stdout, "mnist 2 64 work word\nprocess 0 of 2\nprocess 1 of 2\nlocalhost\n");
    let told = ran.stderr.split_whitespace().collect::<Vec<_>>().join(" ");
    for what in ["line 4, column 9: `--output` has no effect", "`--frobnicate` is not known"] {
        assert!(told.contains(what), "{told}");
    }
    let job = host.ctl(&["show", "-", "--json"]).ok().json();
    assert!(job["job"].as_str().unwrap().starts_with("mnist-"), "{job}");
    assert_eq!(job["spec"]["resources"]["cpus"], 2, "{job}");
    // Nothing is submitted where a value would make another job of it.
    let wrong = host.project("w", &[("a.sh", "#!/bin/bash\n#SBATCH --dependency=singleton\ntrue\n")]);
    host.ctl(&["submit", wrong.join("a.sh").to_str().unwrap()]).code(1).says("`singleton` is not supported");
}
