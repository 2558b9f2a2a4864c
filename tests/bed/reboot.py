"""The row of `guest.py` about an orderly restart of the machine: jobs before it, and what became of them after it.

The machine boots twice for it. What the second boot must know of the first lies on its disk, which holds both.
"""

import json
import time
from pathlib import Path

import containers
from box import answers, eventually, log, ran, show, submit, systemctl, tell, wait_for, why

MARK = Path("/var/lib/bed-reboot.json")

# The first attempt is still there when the machine goes down; the second has nothing to wait for.
SCRIPT = 'echo "attempt of $AGENTD_REPLICA"\ncase $AGENTD_REPLICA in *.1.0) sleep 900 ;; esac\n'

# Where a job runs, and what must have become of it.
CASES = [
    ("host, again", "host", 2, "Completed"),
    ("host, once", "host", 1, "Failed"),
    ("container, again", "container", 2, "Completed"),
    ("container, once", "container", 1, "Failed"),
]


def submit_case(where, attempts):
    if where == "container":
        containers.engine()
    environment = {"image": containers.IMAGE} if where == "container" else "host"
    retry = {"max_attempts": attempts, "backoff": 1}
    return submit("sh job.sh", environment, {"job.sh": SCRIPT}, retry=retry)


def go_down():
    """The first boot: has all jobs running at a time, and restarts the machine as an operator does."""
    config = Path("/etc/agentd/agentd.yaml")
    config.parent.mkdir(exist_ok=True)
    config.write_text(f"slots: {len(CASES)}\n")
    systemctl("restart", "agentd")
    eventually("the daemon to answer", answers)
    jobs = [submit_case(where, attempts) for _, where, attempts, _ in CASES]
    for job in jobs:
        eventually(f"{job} to speak", lambda: log(job))
    systemctl("enable", "agentd", *containers.UNITS)
    boot = Path("/proc/sys/kernel/random/boot_id").read_text()
    MARK.write_text(json.dumps({"jobs": jobs, "boot": boot}))
    ran("sync")
    print("bed: restarting the machine", flush=True)
    systemctl("reboot")
    time.sleep(900)  # systemd ends this with everything else


def row_reboot():
    """The second boot: nobody has started anything by hand."""
    told = json.loads(MARK.read_text())
    held = tell("the machine was restarted", Path("/proc/sys/kernel/random/boot_id").read_text() != told["boot"], True)
    eventually("the daemon that systemd started to answer", answers)
    for (name, _, attempts, end), job in zip(CASES, told["jobs"], strict=True):
        wait_for(job, end)
        shown, story = show(job), why(job)
        code = (shown["fault"] or {}).get("code")
        held += tell(f"{name}: fault", code, "NODE-103" if end == "Failed" else None, story)
        held += tell(f"{name}: attempts", shown["attempt"], attempts, story)
        held += tell(f"{name}: its story has the reason", "NODE-103" in story, True, story)
        held += tell(f"{name}: log", log(job).splitlines()[-1], f"attempt of {job}.{attempts}.0", story)
    return 1 + 4 * len(CASES), held
