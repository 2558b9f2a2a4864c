"""What must hold on a machine with systemd and cgroup v2; runs inside the machine of `tests/bed/machine`.

Each row tries a number of times and counts how often the promise held. The last line says whether all did.
"""

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import containers
import guide
import package
import reboot
import split
from box import (
    CGROUPS,
    HERE,
    answers,
    ctl,
    eventually,
    first_line,
    groups,
    is_populated,
    log,
    main_pid,
    ran,
    show,
    start_agent,
    state,
    submit_python,
    systemctl,
    tell,
    wait_for,
    why,
)


def row_own_scope():
    job = submit_python("print(open('/proc/self/cgroup').read().strip(), flush=True)\nimport time\ntime.sleep(600)")
    group = first_line(job)
    held = "agentjobs.slice" in group and "agentd.service" not in group
    ctl("cancel", job)
    wait_for(job, "Canceled")
    eventually("the groups of the job to be gone", lambda: not groups())
    return 1, int(held)


def row_limits():
    job = submit_python(
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
        job = submit_python(script, memory="96MiB")
        wait_for(job, "Failed")
        held += tell(name, show(job)["fault"]["code"], code, why(job))
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
        job = submit_python(PREFACE + tree, memory="300MiB")
        eventually(f"{job} to be up", lambda: "up" in log(job))
        group = eventually("its group", groups)[0]
        time.sleep(1)
        ctl("cancel", job)
        wait_for(job, "Canceled")
        held += not is_populated(group)
        eventually("its groups to be gone", lambda: not groups())
    return len(TREES), held


TICKER = (
    "import os, time\nprint('pid', os.getpid(), flush=True)\n"
    "for i in range({n}):\n print(i, flush=True)\n time.sleep(0.05)\n"
)


def row_service():
    """kill -9, restart, and stop with start of the service, each while one job runs."""
    count = 900
    job = submit_python(TICKER.format(n=count))
    pid = int(first_line(job).split()[1])
    acts = [["kill", "-s", "KILL", "agentd"], ["restart", "agentd"]] * 3
    held = 0
    for act in acts + [["stop", "agentd"]]:
        systemctl(*act)
        alive = Path(f"/proc/{pid}").exists()
        start_agent()
        held += alive or state(job) == "Completed"
    wait_for(job, "Completed")
    lines = log(job).split("\n")[1:-1]
    whole = lines == [str(i) for i in range(count)]
    if not whole:
        print(f"  {len(lines)} lines where {count} were due")
    return len(acts) + 2, held + int(whole)


def row_watchdog():
    """A daemon that hangs is started again; its job does not notice."""
    job = submit_python(TICKER.format(n=2400))
    pid = int(first_line(job).split()[1])
    before = main_pid("agentd")
    os.kill(before, signal.SIGSTOP)
    eventually("systemd to start the daemon again", lambda: main_pid("agentd") not in (0, before))
    eventually("the daemon to answer", answers)
    held = Path(f"/proc/{pid}").exists()
    ctl("cancel", job)
    wait_for(job, "Canceled")
    return 1, int(held)


ROWS = {
    "package": ("packages install, upgrade under jobs, survive a restart, go", package.row_package),
    "guide": ("the guide of operators is true, from installation to purge", guide.row_guide),
    "reboot": ("an orderly restart ends jobs by its own name, and tries them again", reboot.row_reboot),
    "scope": ("a job has a scope of its own, which goes with it", row_own_scope),
    "limits": ("memory and process limits are the kernel's", row_limits),
    "oom": ("out of memory is told from SIGKILL and from 137", row_oom),
    "cancel": ("cancel leaves no process", row_cancel),
    "service": ("restart, stop and kill of the service leave the job", row_service),
    "watchdog": ("a hanging daemon is replaced, the job goes on", row_watchdog),
    **containers.ROWS,
    "split": ("a daemon that is no root does all of it, by its helper", split.row_split),  # the last: it stays so
}


def install():
    """As packages do, but with a daemon that is root, whose jobs are root's in all rows but one."""
    split.LIBRARY.mkdir(exist_ok=True)
    for name in ("agentd", "agentctl", "agent-shim", "agent-spawn"):
        shutil.copy(HERE / name, split.LIBRARY)
        Path(f"/usr/bin/{name}").symlink_to(split.LIBRARY / name)
    for unit in (HERE / "systemd").glob("*.s*"):
        shutil.copy(unit, "/etc/systemd/system")
    ran("systemd-sysusers", str(HERE / "systemd/sysusers.conf"))
    split.AS_ROOT.parent.mkdir(exist_ok=True)
    shutil.copy(HERE / "systemd/agentd-root.conf", split.AS_ROOT)
    systemctl("daemon-reload")
    start_agent()
    print(ctl("status"))


def main():
    release, tree = os.uname().release, (CGROUPS / "cgroup.controllers").read_text().strip()
    print(f"bed: kernel {release}, cgroup v2 with {tree}")
    # The rows of packages start from a machine without the programs, so each is for itself.
    wanted = sys.argv[1:] or [name for name in ROWS if name not in ("package", "guide")]
    table, good = [], True
    try:
        if wanted == ["package"]:
            if not package.MARK.exists():
                package.go_down()
        elif wanted != ["guide"] and not reboot.MARK.exists():
            install()
            if "reboot" in wanted:
                reboot.go_down()
        for name in wanted:
            what, run = ROWS[name]
            started = time.monotonic()
            try:
                tried, survived = run()
            except Exception as error:  # whatever broke, the row did not hold, and the others are tried all the same
                print(f"  {name}: {type(error).__name__}: {error}")
                tried, survived = 1, 0
            good &= tried == survived
            table.append(f"{name:<14} {what:<60} {tried:>5} {survived:>8} {time.monotonic() - started:>7.0f} s")
            print(f"bed: {table[-1]}", flush=True)
    except (AssertionError, subprocess.SubprocessError, OSError) as error:
        good = False
        print(f"  {error}")
    if not good:
        print(ran("journalctl", "-u", "agentd", "-u", "agent-spawn*", "-u", "docker", "-n", "80", "--no-pager", ok=False).stdout)
    print(f"\n{'row':<14} {'promise':<60} {'tried':>5} {'survived':>8}    took")
    print("\n".join(table))
    print("bed: all survived" if good else "bed: something did not survive")


main()
