"""What must hold on a machine with systemd and cgroup v2; runs inside the machine of `tests/bed/machine`.

Each row tries a number of times and counts how often the promise held. The last line says whether all did.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

SOON = 240  # seconds; an emulated machine is slow
HERE = Path(__file__).parent


def ctl(*arguments, ok=True):
    ran = subprocess.run(["agentctl", *arguments], capture_output=True, text=True, timeout=SOON)
    if ok and ran.returncode != 0:
        raise AssertionError(f"agentctl {' '.join(arguments)}: {ran.returncode}\n{ran.stdout}{ran.stderr}")
    return ran.stdout


def eventually(what, ready, deadline=SOON):
    end = time.monotonic() + deadline
    while time.monotonic() < end:
        value = ready()
        if value:
            return value
        time.sleep(0.3)
    raise AssertionError(f"after {deadline} s still waiting: {what}")


def submit(script, memory=None):
    """Submits a Python script and gives the job's name."""
    project = Path("/root/project")
    shutil.rmtree(project, ignore_errors=True)
    project.mkdir()
    (project / "job.py").write_text(script)
    resources = f"resources: {{memory: {memory}}}\n" if memory else ""
    (project / "job.yml").write_text(f"code: .\ncommand: python3 job.py\nlimits: {{grace: 2s}}\n{resources}")
    return ctl("submit", str(project)).strip().splitlines()[-1]


def show(job):
    return json.loads(ctl("show", job, "--json"))


def state(job):
    return show(job)["state"]


def wait_for(job, *states):
    try:
        eventually(f"{job} to be {states}", lambda: state(job) in states)
    except AssertionError as error:
        raise AssertionError(f"{error}\n{ctl('why', job, ok=False)}") from None


def log(job):
    return ctl("logs", job)


def first_line(job):
    return eventually(f"{job} to speak", lambda: log(job).split("\n", 1)[0])


def daemon_pid():
    shown = subprocess.run(["systemctl", "show", "-P", "MainPID", "agentd"], capture_output=True, text=True)
    return int(shown.stdout)


def answers():
    return subprocess.run(["agentctl", "nodes"], capture_output=True).returncode == 0


def marked(text):
    """Every process whose command line or environment holds `text`."""
    found = []
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            held = Path(f"/proc/{pid}/cmdline").read_bytes() + Path(f"/proc/{pid}/environ").read_bytes()
        except OSError:
            continue
        if text.encode() in held:
            found.append(int(pid))
    return found


def groups():
    """The control groups of jobs that are there now, each with those below it."""
    slice = Path("/sys/fs/cgroup/agent.slice/agent-jobs.slice")
    return [group for group in slice.glob("*") if group.is_dir()]


def row_own_scope():
    job = submit("print(open('/proc/self/cgroup').read().strip(), flush=True)\nimport time\ntime.sleep(600)")
    group = first_line(job)
    held = "agent-jobs.slice" in group and "agentd.service" not in group
    ctl("cancel", job)
    wait_for(job, "Canceled")
    eventually("the groups of the job to be gone", lambda: not groups())
    return 1, int(held)


def row_limits():
    job = submit(
        "group = '/sys/fs/cgroup' + open('/proc/self/cgroup').read().strip().split('::')[1]\n"
        "print(open(group + '/memory.max').read().strip(), open(group + '/pids.max').read().strip())",
        memory="96MiB",
    )
    wait_for(job, "Completed")
    memory, pids = log(job).split()
    return 2, int(memory == str(96 << 20)) + int(pids.isdigit())


ALLOCATE = "x = bytearray(); [x.extend(bytes(1 << 20)) for _ in range(400)]"

OOM_CASES = [
    ("main", ALLOCATE, "RUN-104"),
    ("child", f"import subprocess, sys\nsubprocess.run([sys.executable, '-c', {ALLOCATE!r}])\nsys.exit(1)", "RUN-104"),
    ("exit 137", "import sys\nsys.exit(137)", "RUN-101"),
    ("kill -9", "import os\nos.kill(os.getpid(), 9)", "RUN-103"),
]


def row_oom():
    held = 0
    for name, script, code in OOM_CASES:
        job = submit(script, memory="96MiB")
        wait_for(job, "Failed")
        found = show(job)["fault"]["code"]
        held += found == code
        if found != code:
            print(f"  {name}: {found} where {code} was due\n{ctl('why', job)}")
    return len(OOM_CASES), held


PREFACE = "import os, signal, subprocess, sys, time\nprint('up', flush=True)\n"

TREES = [
    "signal.signal(signal.SIGTERM, signal.SIG_IGN)\ntime.sleep(900)",
    "if os.fork() == 0:\n os.setsid()\n if os.fork() == 0:\n  time.sleep(900)\n os._exit(0)\ntime.sleep(900)",
    "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
    "for _ in range(20):\n if os.fork() == 0:\n  os.setsid()\n  time.sleep(900)\ntime.sleep(900)",
    "subprocess.Popen(['unshare', '--pid', '--fork', 'sleep', '900'])\ntime.sleep(900)",
    "if os.fork() == 0:\n os.setsid()\n os.execve('/bin/sleep', ['sleep', '900'], {})\ntime.sleep(900)",
    "if os.fork() == 0:\n os.kill(os.getpid(), signal.SIGSTOP)\ntime.sleep(900)",
    "signal.signal(signal.SIGTERM, lambda *_: [os.fork() for _ in range(3)])\nwhile True: time.sleep(1)",
    "while True:\n try:\n  os.fork()\n except OSError:\n  pass",
]


def row_cancel():
    held = 0
    for tree in TREES:
        job = submit(PREFACE + tree, memory="300MiB")
        eventually(f"{job} to be up", lambda: "up" in log(job))
        group = eventually("its group", groups)[0]
        time.sleep(1)
        ctl("cancel", job)
        wait_for(job, "Canceled")
        left = group.exists() and (group / "cgroup.events").read_text().startswith("populated 1")
        held += not left
        eventually("its groups to be gone", lambda: not groups())
    return len(TREES), held


TICKER = "import os, time\nprint('pid', os.getpid(), flush=True)\nfor i in range({n}):\n print(i, flush=True)\n time.sleep(0.05)\n"


def row_service():
    """kill -9, restart, and stop with start of the service, each while one job runs."""
    count = 900
    job = submit(TICKER.format(n=count))
    pid = int(first_line(job).split()[1])
    acts = [["systemctl", "kill", "-s", "KILL", "agentd"], ["systemctl", "restart", "agentd"]] * 3
    held = 0
    for act in acts + [["systemctl", "stop", "agentd"]]:
        subprocess.run(act, check=True, timeout=SOON)
        alive = Path(f"/proc/{pid}").exists() or state(job) == "Completed"
        subprocess.run(["systemctl", "reset-failed", "agentd"], check=False)
        subprocess.run(["systemctl", "start", "agentd"], check=True, timeout=SOON)
        eventually("the daemon to answer", answers)
        held += alive
    wait_for(job, "Completed")
    lines = log(job).split("\n")[1:-1]
    whole = lines == [str(i) for i in range(count)]
    if not whole:
        print(f"  {len(lines)} lines where {count} were due")
    return len(acts) + 2, held + int(whole)


def row_watchdog():
    """A daemon that hangs is started again; its job does not notice."""
    job = submit(TICKER.format(n=2400))
    pid = int(first_line(job).split()[1])
    before = daemon_pid()
    os.kill(before, signal.SIGSTOP)
    eventually("systemd to start the daemon again", lambda: daemon_pid() not in (0, before))
    eventually("the daemon to answer", answers)
    held = Path(f"/proc/{pid}").exists()
    ctl("cancel", job)
    wait_for(job, "Canceled")
    return 1, int(held)


ROWS = {
    "scope": ("a job has a scope of its own, which goes with it", row_own_scope),
    "limits": ("memory and process limits are the kernel's", row_limits),
    "oom": ("out of memory is told from SIGKILL and from 137", row_oom),
    "cancel": ("cancel leaves no process", row_cancel),
    "service": ("restart, stop and kill of the service leave the job", row_service),
    "watchdog": ("a hanging daemon is replaced, the job goes on", row_watchdog),
}


def install():
    for name in ("agentd", "agentctl", "agent-shim"):
        shutil.copy(HERE / name, f"/usr/bin/{name}")
    for unit in (HERE / "systemd").glob("*.s*"):
        shutil.copy(unit, "/etc/systemd/system")
    subprocess.run(["systemctl", "daemon-reload"], check=True)
    subprocess.run(["systemctl", "start", "agentd"], check=True, timeout=SOON)
    eventually("the daemon to answer", answers)
    print(ctl("status"))


def main():
    release, tree = os.uname().release, Path("/sys/fs/cgroup/cgroup.controllers").read_text().strip()
    print(f"bed: kernel {release}, cgroup v2 with {tree}")
    wanted = sys.argv[1:] or list(ROWS)
    table, good = [], True
    try:
        install()
        for name in wanted:
            what, run = ROWS[name]
            started = time.monotonic()
            try:
                tried, survived = run()
            except (AssertionError, subprocess.SubprocessError, OSError, KeyError, TypeError, ValueError) as error:
                print(f"  {name}: {error}")
                tried, survived = 1, 0
            good &= tried == survived
            table.append(f"{name:<10} {what:<55} {tried:>5} {survived:>8} {time.monotonic() - started:>7.0f} s")
            print(f"bed: {table[-1]}", flush=True)
    except (AssertionError, subprocess.SubprocessError, OSError) as error:
        good = False
        print(f"  {error}")
    if not good:
        journal = subprocess.run(["journalctl", "-u", "agentd", "-n", "60", "--no-pager"], capture_output=True, text=True)
        print(journal.stdout)
    print(f"\n{'row':<10} {'promise':<55} {'tried':>5} {'survived':>8}    took")
    print("\n".join(table))
    print("bed: all survived" if good else "bed: something did not survive")


main()
