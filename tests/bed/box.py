"""What the rows of `tests/bed` ask the machine they run in: the product through its client, systemd, control groups."""

import json
import os
import shutil
import subprocess
import time
from pathlib import Path

SOON = 240  # seconds; an emulated machine is slow
HERE = Path(__file__).parent
CGROUPS = Path("/sys/fs/cgroup")
PROJECT = Path("/root/project")
ENDED = ("Completed", "Failed", "Canceled")


def ran(*command, ok=True, limit=SOON, **more):
    """Runs a command to its end, which must be good unless the caller looks at it."""
    done = subprocess.run(command, capture_output=True, text=True, timeout=limit, **more)
    if ok and done.returncode != 0:
        raise AssertionError(f"{' '.join(map(str, command))}: {done.returncode}\n{done.stdout}{done.stderr}")
    return done


def ctl(*arguments, ok=True):
    return ran("agentctl", *arguments, ok=ok).stdout


def eventually(what, ready, deadline=SOON):
    end = time.monotonic() + deadline
    while time.monotonic() < end:
        value = ready()
        if value:
            return value
        time.sleep(0.3)
    raise AssertionError(f"after {deadline} s still waiting: {what}")


def submit(command, environment="host", files=(), retry=None, **resources):
    """Submits a job with these files in its directory and gives its name."""
    shutil.rmtree(PROJECT, ignore_errors=True)
    PROJECT.mkdir()
    for name, text in dict(files).items():
        (PROJECT / name).write_text(text)
    job = {
        "code": ".",
        "command": command,
        "environment": environment,
        "limits": {"grace": "2s"},
        "resources": resources,
    }
    if retry:
        job["retry"] = retry
    (PROJECT / "job.yml").write_text(json.dumps(job))  # which is YAML too
    return ctl("submit", str(PROJECT)).strip().splitlines()[-1]


def submit_python(script, **resources):
    """Submits a Python script that runs on the machine itself."""
    return submit("python3 job.py", files={"job.py": script}, **resources)


def show(job):
    return json.loads(ctl("show", job, "--json"))


def state(job):
    return show(job)["state"]


def why(job):
    return ctl("why", job, ok=False)


def wait_for(job, *states):
    """Waits until a job is in one of these states; one that ended in another is not waited for."""

    def there():
        now = state(job)
        if now in ENDED and now not in states:
            raise AssertionError(f"{job} is {now}, not {states}\n{why(job)}")
        return now in states

    try:
        eventually(f"{job} to be {states}", there)
    except AssertionError as error:
        raise AssertionError(f"{error}\n{why(job)}") from None


def log(job):
    return ctl("logs", job)


def first_line(job):
    return eventually(f"{job} to speak", lambda: log(job).split("\n", 1)[0])


def answers():
    return ran("agentctl", "nodes", ok=False).returncode == 0


def systemctl(*arguments):
    ran("systemctl", *arguments)


def main_pid(unit):
    """The first process of a service, 0 for none."""
    return int(ran("systemctl", "show", "-P", "MainPID", unit).stdout)


def start_agent():
    """Starts the daemon however often it was ended before, and waits until it answers."""
    ran("systemctl", "reset-failed", "agentd", ok=False)
    systemctl("start", "agentd")
    eventually("the daemon to answer", answers)


def is_populated(group):
    """Whether anybody is in a control group or below it."""
    try:
        return "populated 1" in (group / "cgroup.events").read_text().splitlines()
    except OSError:
        return False


def groups():
    """The control groups of jobs that are there now, each with those below it."""
    slice = CGROUPS / "agentjobs.slice"
    return [group for group in slice.glob("*") if group.is_dir()]


def tell(name, found, due, story=""):
    """Whether what was found is what was due; says so where it is not."""
    if found != due:
        print(f"  {name}: {found!r} where {due!r} was due\n{story}", flush=True)
    return int(found == due)
