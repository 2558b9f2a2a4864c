"""The row of `guest.py` about packages under systemd: install, upgrade and downgrade under running jobs, restart, purge.

Jobs belong to a user of the machine, as they do where several people share one. The machine boots twice; what the second
boot must know of the first lies on its disk. Which jobs run is asked of the kernel, not of the product.
"""

import json
import os
import time
from pathlib import Path

import containers
from box import HERE, eventually, main_pid, ran, systemctl, tell

MARK = Path("/var/lib/bed-package.json")
DEBS = HERE / "packages"
WHO = "ada"
LINES = 1200
# Its process speaks first, so that the kernel can be asked about it.
HOST = f"""import os, time
print('pid', os.getpid(), flush=True)
for i in range({LINES}):
    print(i, flush=True)
    time.sleep(0.1)
"""
CONTAINER = f"i=0; while [ $i -lt {LINES} ]; do echo $i; i=$((i+1)); sleep 0.1; done"


def install(version):
    ran("dpkg", "-i", *map(str, sorted((DEBS / version).glob("*.deb"))), env={**os.environ, "DEBIAN_FRONTEND": "noninteractive"})


def ctl(*arguments, ok=True):
    """The client in the hands of a user who may do no more than others of the group."""
    return ran("runuser", "-u", WHO, "--", "agentctl", *arguments, ok=ok).stdout


def answers():
    return ran("runuser", "-u", WHO, "--", "agentctl", "nodes", ok=False).returncode == 0


def submit(number, environment, command, script, **more):
    project = Path(f"/home/{WHO}/project-{number}")
    project.mkdir(exist_ok=True)
    name, text = script
    (project / name).write_text(text)
    (project / "job.yml").write_text(json.dumps({"code": ".", "command": command, "environment": environment, **more}))
    ran("chown", "-R", WHO, str(project))
    return ctl("submit", str(project)).strip().splitlines()[-1]


def state(job):
    return json.loads(ctl("show", job, "--json"))["state"]


def lines(job):
    return ctl("logs", job, ok=False).splitlines()


def submit_all():
    """Five jobs, three on the machine and two in containers, each of which has spoken."""
    containers.engine()
    jobs = [submit(i, "host", "python3 job.py", ("job.py", HOST)) for i in range(3)]
    image = {"image": containers.IMAGE}
    jobs += [submit(i, image, "sh job.sh", ("job.sh", CONTAINER)) for i in (3, 4)]
    for job in jobs:
        eventually(f"{job} to speak", lambda: len(lines(job)) > 2)
    return jobs


def alive(jobs, pids):
    """How many of the jobs on the machine, and of those in containers, have their processes."""
    label = "label=agentd.job="
    running = [ran("docker", "ps", "-q", "--filter", label + job).stdout.split() for job in jobs[len(pids) :]]
    return sum(Path(f"/proc/{pid}").exists() for pid in pids) + sum(map(len, running))


def whole(jobs):
    """How many completed with every line of theirs, once."""
    for job in jobs:
        eventually(f"{job} to end", lambda: state(job) in ("Completed", "Failed", "Canceled"), 900)
    numbers = [str(i) for i in range(LINES)]
    told = [lines(job) for job in jobs]
    return sum(state(job) == "Completed" and found[-LINES:] == numbers for job, found in zip(jobs, told, strict=True))


def unit(what):
    return ran("systemctl", what, "agentd", ok=False).stdout.strip()


def go_down():
    """The first boot: everything up to the restart of the machine."""
    ran("useradd", "--create-home", WHO)
    config = Path("/etc/agentd/agentd.yaml")
    install("older")
    held = tell("the service after the installation", [unit("is-enabled"), unit("is-active")], ["enabled", "active"])
    config.write_text("slots: 5\nsocket_group: agentd\noperator_group: agentd-admin\n")
    ran("usermod", "-aG", "agentd", WHO)
    ran("usermod", "-aG", "docker", "agentd")  # the engine is not the daemon's unless somebody says so
    systemctl("restart", "agentd")
    eventually("the daemon to answer a member of its group", answers)
    print(ran("systemd-analyze", "security", "--no-pager", "agentd", ok=False).stdout, flush=True)
    jobs = submit_all()
    pids = [lines(job)[0].split()[1] for job in jobs[:3]]
    held += tell("whom they run as", {Path(f"/proc/{pid}").owner() for pid in pids}, {WHO})
    for version in ("newer", "older"):
        before = main_pid("agentd")
        install(version)
        eventually("the daemon to answer", answers)
        held += tell(f"another daemon after {version}", main_pid("agentd") not in (0, before), True)
        held += tell(f"jobs after {version}", alive(jobs, pids), 5)
        held += tell(f"configuration after {version}", "slots: 5" in config.read_text(), True)
    ran("dpkg", "-r", "agentd")
    held += tell("jobs after remove", alive(jobs, pids), 5)
    install("newer")
    eventually("the daemon to answer", answers)
    held += tell("jobs that completed with every line", whole(jobs), 5)
    boot = Path("/proc/sys/kernel/random/boot_id").read_text()
    MARK.write_text(json.dumps({"held": held, "boot": boot}))
    ran("sync")
    print("bed: restarting the machine", flush=True)
    systemctl("reboot")
    time.sleep(900)  # systemd ends this with everything else


def row_package():
    """The second boot: nobody has started anything by hand; then all of it goes."""
    told = json.loads(MARK.read_text())
    held = told["held"]
    held += tell("the machine was restarted", Path("/proc/sys/kernel/random/boot_id").read_text() != told["boot"], True)
    eventually("the daemon that systemd started to answer", answers)
    job = submit(5, "host", "echo again", ("nothing", ""))
    eventually(f"{job} to end", lambda: state(job) == "Completed")
    said = ran("dpkg", "-P", "agentd").stdout
    held += tell("purge says what goes", "removing /var/lib/agentd" in said, True)
    gone = [path for path in ("/var/lib/agentd", "/etc/agentd", "/run/agentd") if Path(path).exists()]
    held += tell("what purge leaves", gone, [])
    held += tell("homes", Path(f"/home/{WHO}/project-5/job.yml").exists(), True)
    return 14, held
