"""The row of `guest.py` that follows `agent/docs/operations.md`: every command of it, in order, from the installation to
the purge, on a machine that never had the programs.

Owns what must be so after each section, the least of which is that a job goes on. The document is read where the machine
finds it; what it shows and one machine without a network cannot do is in ELSEWHERE.
"""

import os
import re
from pathlib import Path

from box import HERE, eventually, main_pid, ran, systemctl, tell
from package import DEBS, WHO, answers, ctl, lines, state, submit, unit

HOME = Path(f"/home/{WHO}")
# The archive for users without root is row A1 of tests/package; two machines are suite `system`.
ELSEWHERE = ("./install.sh", "controller$ ", "machine$ ")
# The versions of the document, and where packages are that stand for them.
VERSIONS = {"0.1.0": DEBS, "0.2.0": DEBS / "newer"}
GO = HOME / "go"
# Its process speaks first, so that the kernel can be asked about it; it counts until it is told to end.
COUNTS = f"""import os, time
print('pid', os.getpid(), flush=True)
i = 0
while not os.path.exists('{GO}'):
    print(i, flush=True)
    i += 1
    time.sleep(0.1)
print('ended', flush=True)
"""


def commands(section):
    """The commands of a section of the document, without their prompts."""
    text = (HERE / "operations.md").read_text().split(f"\n## {section}\n")[1].split("\n## ")[0]
    shown = re.findall(r"^([a-z]*\$ .*)$", text, re.MULTILINE)
    return [line.removeprefix("$ ") for line in shown if not line.removeprefix("$ ").startswith(ELSEWHERE)]


def types(command):
    """Types a command as root where it begins with sudo, else as a user, whose groups are those of now."""
    if command.startswith("agentctl"):
        eventually("the daemon to answer", answers)
    shell = ("sh", "-c", command.removeprefix("sudo "))
    who = () if command.startswith("sudo ") else ("runuser", "-u", WHO, "--")
    print(f"  $ {command}", flush=True)
    return ran(*who, *shell, cwd=HOME, env={**os.environ, "DEBIAN_FRONTEND": "noninteractive"}).stdout


def walk(section):
    for command in commands(section):
        types(command)


def prepare():
    ran("useradd", "--create-home", WHO)
    project = HOME / "my-project"
    project.mkdir()
    (project / "job.yml").write_text("command: echo it ran >outputs/said\ncode: .\nenvironment: host\n")
    ran("chown", "-R", WHO, str(project))
    for version, packages in VERSIONS.items():
        for name in ("agentd", "agentctl"):
            (package,) = packages.glob(f"{name}_*_amd64.deb")
            (HOME / f"{name}_{version}_amd64.deb").symlink_to(package)
    Path("/etc/apt/apt.conf.d/90guide").write_text('APT::Get::Assume-Yes "true";\nAPT::Install-Recommends "false";\n')


def version():
    return ran("dpkg-query", "-W", "-f", "${Version}", "agentd").stdout


def packed(packages):
    (package,) = packages.glob("agentd_*_amd64.deb")
    return ran("dpkg-deb", "--field", str(package), "Version").stdout.strip()


def last_state():
    return state("-")


def of_installation():
    walk("Install")
    held = tell("the service", [unit("is-enabled"), unit("is-active")], ["enabled", "active"])
    return 2, held + tell("the first job", last_state(), "Completed")


def of_changes(job, pid):
    """Configuration, upgrade and downgrade, each while a job runs; gives how often what had to be so was."""
    config = Path("/etc/agentd/agentd.yaml")
    config.write_text(config.read_text() + "slots: 5\n")
    before = main_pid("agentd")
    walk("Change the configuration")
    held = tell("another daemon", main_pid("agentd") not in (0, before), True)
    config.write_text(config.read_text() + "log: debug\n")
    types("sudo systemctl reload agentd")
    shown = ran("agentd", "show-config").stdout
    held += tell("slots", bool(re.search(r"^slots: 5 ", shown, re.MULTILINE)), True, shown)
    walk("Upgrade and downgrade")
    held += tell("the newer version", version(), packed(VERSIONS["0.2.0"]))
    types(commands("Install")[0].replace("install", "install --allow-downgrades"))
    held += tell("the older version", version(), packed(VERSIONS["0.1.0"]))
    eventually("the daemon to answer", answers)
    held += tell("the job meanwhile", (Path(f"/proc/{pid}").exists(), state(job)), (True, "Running"))
    return 5, held


def is_whole(job):
    """Whether a job that counts has completed with every line, once."""
    counted = lines(job)[1:-1]
    whole = counted == [str(i) for i in range(len(counted))] and lines(job)[-1] == "ended"
    return state(job) == "Completed" and whole


def of_removal(job):
    remove, purge = commands("Uninstall")
    types(remove)
    found = [Path("/usr/bin/agentd").exists(), Path("/var/lib/agentd/controller").exists()]
    held = tell("programs and state after remove", found, [False, True])
    types(commands("Install")[0])
    eventually("the daemon to answer", answers)
    held += tell("the job after another installation", is_whole(job), True)
    types(purge)
    gone = [path for path in ("/var/lib/agentd", "/etc/agentd", "/run/agentd") if Path(path).exists()]
    held += tell("what purge leaves", gone, [])
    return 4, held + tell("homes", (HOME / "my-project/job.yml").exists(), True)


def row_guide():
    prepare()
    tried, held = of_installation()
    ran("usermod", "-aG", "agentd-admin", WHO)  # as the table of groups says of those who drain
    job = submit(0, "host", "python3 job.py", ("job.py", COUNTS))
    pid = eventually(f"{job} to speak", lambda: lines(job))[0].split()[1]
    more, good = of_changes(job, pid)
    tried, held = tried + more, held + good
    GO.touch()
    eventually(f"{job} to end", lambda: state(job) != "Running")
    walk("Drain")
    walk("Backup")
    held += tell("who may read the backup", (HOME / "agentd-backup.tar.gz").stat().st_mode & 0o777, 0o600)
    held += tell("the job in the backup", is_whole(job), True)
    more, good = of_removal(job)
    return tried + 2 + more, held + good
