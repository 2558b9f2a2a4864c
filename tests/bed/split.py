"""The row of `guest.py` about the service as packages start it: the daemon is an ordinary user, and a helper does what
root alone can. Jobs are of a user of the machine. What is theirs is asked of the kernel and of systemd.
"""

import json
from pathlib import Path

import containers
from box import CGROUPS, eventually, groups, is_populated, main_pid, ran, start_agent, systemctl, tell
from package import WHO, ctl, lines, state, submit

LIBRARY = Path("/usr/lib/agentd")
AS_ROOT = Path("/etc/systemd/system/agentd.service.d/root.conf")
CONFIG = "slots: 4\nsocket_group: agentd\noperator_group: agentd-admin\n"
SYSLOG = 1 << 34

GROUP = """import os, time
group = '/sys/fs/cgroup' + open('/proc/self/cgroup').read().strip().split('::')[1]
read = lambda name: open(f'{group}/{name}').read().strip() if os.access(f'{group}/{name}', os.R_OK) else 'closed'
print(group, read('memory.max'), read('pids.max'), flush=True)
time.sleep(900)
"""
ALLOCATE = "x = bytearray(); [x.extend(bytes(1 << 20)) for _ in range(400)]"
HIDES = """import os, time
print('up', flush=True)
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        os.execve('/bin/sleep', ['sleep', '900'], {})
    os._exit(0)
time.sleep(900)
"""
COUNT = 300
TICKER = f"import time\nfor i in range({COUNT}):\n    print(i, flush=True)\n    time.sleep(0.1)\n"


def switch():
    """What `agent/docs/security.md` tells operators to do, when no job runs."""
    eventually("no job to run", lambda: not groups())
    ran("useradd", "--create-home", WHO)
    ran("usermod", "-aG", "agentd", WHO)
    Path("/etc/agentd").mkdir(exist_ok=True)
    Path("/etc/agentd/agentd.yaml").write_text(CONFIG)
    systemctl("stop", "agentd")
    ran("chown", "-R", "agentd:", "/var/lib/agentd")
    AS_ROOT.unlink()
    systemctl("daemon-reload")
    start_agent()


def status_of(pid, name):
    found = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(line.split()[1] for line in found if line.startswith(f"{name}:"))


def python(number, script, **resources):
    limits = {"grace": "2s"}
    return submit(number, "host", "python3 job.py", ("job.py", script), limits=limits, resources=resources)


def ended(job):
    return eventually(f"{job} to end", lambda: (now := state(job)) in ("Completed", "Failed", "Canceled") and now)


def code_of(job):
    return json.loads(ctl("show", job, "--json")).get("fault", {}).get("code")


def of_groups():
    """Limits and ends are those of the job's own group, in a scope that the helper had made."""
    job = python(1, GROUP, memory="96MiB")
    group, memory, pids = eventually(f"{job} to speak", lambda: lines(job))[0].split()
    scope = next(part for part in Path(group).parts if part.endswith(".scope"))
    denied = ran("systemctl", "show", "-P", "IPAddressDeny", scope).stdout
    found = ["agentjobs.slice" in group, memory, pids.isdigit(), "169.254.169.254" in denied]
    held = tell("the group of a job", found, [True, str(96 << 20), True, True])
    ctl("cancel", job)
    held += tell("a job that is canceled", ended(job), "Canceled")
    job = python(2, ALLOCATE, memory="96MiB")
    ended(job)
    held += tell("who needs more memory", code_of(job), "RUN-104")
    job = python(3, HIDES)
    eventually(f"{job} to be up", lambda: "up" in lines(job))
    top = CGROUPS / "agentjobs.slice"
    ctl("cancel", job)
    ended(job)
    held += tell("who is left of a job that hides", is_populated(top), False)
    return 4, held


def of_restarts():
    job = python(4, TICKER)
    eventually(f"{job} to speak", lambda: lines(job))
    systemctl("kill", "-s", "KILL", "agentd", "agent-spawn")
    start_agent()
    systemctl("restart", "agent-spawn", "agentd")
    start_agent()
    ended(job)
    return 1, tell("lines through restarts of both", lines(job), [str(i) for i in range(COUNT)])


def of_containers():
    """The engine is not the daemon's unless somebody says so; that it is not is told plainly."""
    containers.engine()
    systemctl("restart", "agentd")
    start_agent()
    said = ran("agentctl", "doctor", ok=False).stdout
    held = tell("doctor names the group", "docker" in said and "group" in said, True, said)
    ran("usermod", "-aG", "docker", "agentd")
    systemctl("restart", "agentd")
    start_agent()
    job = submit(5, {"image": containers.IMAGE}, "id -u; echo kept >outputs/x", ("nothing", ""))
    ended(job)
    uid = ran("id", "-u", WHO).stdout.strip()
    held += tell("a job in a container", (state(job), lines(job)), ("Completed", [uid]), ctl("why", job, ok=False))
    return 2, held


def row_split():
    switch()
    pid = main_pid("agentd")
    user = ran("id", "-u", "agentd").stdout.strip()
    found = [status_of(pid, "Uid"), *(int(status_of(pid, name), 16) for name in ("CapEff", "CapBnd"))]
    tried, held = 2, tell("who the daemon is", found, [user, SYSLOG, SYSLOG])
    root = Path("/root/refused")
    root.mkdir()
    (root / "job.yml").write_text("command: id\nenvironment: host\ncode: .\n")
    job = ran("agentctl", "submit", str(root)).stdout.strip().splitlines()[-1]
    held += tell("a job of root's", eventually(f"{job} to end", lambda: json.loads(ran("agentctl", "show", job, "--json").stdout)["state"] == "Failed"), True)
    for part in (of_groups, of_restarts, of_containers):
        more, good = part()
        tried, held = tried + more, held + good
    return tried, held
