"""Process trees that do not want to die: `nasty.py KIND`.

Every process that is to be missed leaves a file in the directory WITNESS, named by its number and holding
its start time. The main process prints `up` when all of them are there, and then stays, or leaves at once
when LEAVE is set. Nothing here heeds SIGTERM.
"""

import ctypes
import os
import signal
import sys
import threading
import time

WITNESS = os.environ.get("WITNESS", "")
LIBC = ctypes.CDLL(None, use_errno=True)
CLONE_NEWUSER, CLONE_NEWPID = 0x10000000, 0x20000000
PR_SET_NAME, PR_SET_CHILD_SUBREAPER, PTRACE_TRACEME = 15, 36, 0


def outer_pid():
    """The number the machine knows this process by, also from inside a namespace."""
    return int(os.readlink("/proc/self"))


def seen():
    pid = outer_pid()
    with open(f"/proc/{pid}/stat", errors="replace") as stat:
        started = stat.read().rsplit(")", 1)[1].split()[19]
    with open(f"{WITNESS}/.{pid}", "w") as file:
        file.write(started)
    os.rename(f"{WITNESS}/.{pid}", f"{WITNESS}/{pid}")


def deaf():
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)


def stay():
    seen()
    while True:
        time.sleep(1000)


def child(function):
    pid = os.fork()
    if pid == 0:
        try:
            function()
        finally:
            os._exit(0)
    return pid


def daemonize(function):
    """Two forks and a session: nobody's child any more."""

    def first():
        os.setsid()
        child(function)

    os.waitpid(child(first), 0)


def plain():
    child(stay)
    return 2


def inherited():
    def middle():
        child(stay)
        stay()

    child(middle)
    return 3


def daemon():
    def away():
        os.chdir("/")
        os.closerange(0, 64)
        stay()

    daemonize(away)
    return 2


def stopped():
    def stop():
        seen()
        while True:
            os.kill(os.getpid(), signal.SIGSTOP)

    daemonize(stop)
    child(stop)
    return 3


def traced():
    def tracee():
        LIBC.ptrace(PTRACE_TRACEME, 0, None, None)
        seen()
        while True:
            os.kill(os.getpid(), signal.SIGSTOP)

    def tracer():
        child(tracee)
        stay()  # never waits, so the child never goes on

    daemonize(tracer)
    return 3


def namespace(flags):
    def enter():
        if LIBC.unshare(flags) != 0:
            sys.exit(f"unshare: {os.strerror(ctypes.get_errno())}")

        def init():
            child(lambda: (os.setsid(), stay()))
            stay()

        child(init)
        stay()

    child(enter)
    return 4


def cleared():
    """A program of its own, without a variable and outside of the job's directory."""

    def away():
        os.chdir("/")
        script = os.path.abspath(sys.argv[0])
        os.execve("/usr/bin/python3", ["python3", script, "witnessed", WITNESS], {})

    sys.argv[0] = os.path.abspath(sys.argv[0])
    daemonize(away)
    return 2


def deep():
    depth = 40

    def down(left):
        if left:
            child(lambda: down(left - 1))
        stay()

    child(lambda: down(depth - 1))
    return depth + 1


def threads():
    def crowd():
        for _ in range(60):
            threading.Thread(target=time.sleep, args=(1000,), daemon=True).start()
        stay()

    child(crowd)
    daemonize(crowd)
    return 3


def on_term():
    """Answers the polite signal with children."""

    def answer(_number, _frame):
        daemonize(lambda: (deaf(), stay()))

    def parent():
        signal.signal(signal.SIGTERM, answer)
        stay()

    child(parent)
    daemonize(parent)
    return 3


def guards():
    """Two that start each other again."""

    def guard():
        os.setsid()
        seen()
        while True:
            partner = child(stay)
            os.waitpid(partner, 0)

    child(guard)
    daemonize(guard)
    return 5


def reaper():
    """Keeps its own orphans, and does not reap them."""

    def keep():
        LIBC.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        for _ in range(5):
            daemonize(stay)
        for _ in range(100):
            child(lambda: None)
        stay()

    child(keep)
    return 7


def named():
    """A name that a careless reader of /proc takes for the rest of the line."""

    def name():
        LIBC.prctl(PR_SET_NAME, b") Z 1 1 (\n", 0, 0, 0)
        stay()

    child(name)
    daemonize(name)
    return 3


def nobody():
    def other():
        os.setgid(65534)
        os.setuid(65534)
        while True:
            time.sleep(1000)

    daemonize(lambda: (seen(), other()))
    return 2


def escaped():
    """Leaves its control groups, as root may."""

    def away():
        for tree in os.listdir("/sys/fs/cgroup"):
            try:
                with open(f"/sys/fs/cgroup/{tree}/cgroup.procs", "w") as procs:
                    procs.write("0")
            except OSError:
                pass
        os.setsid()
        stay()

    child(away)
    daemonize(away)
    return 3


def rolling():
    """Never the same process for longer than a fork takes."""

    def roll():
        os.setsid()
        seen()  # the number of its group, too
        while True:
            if os.fork():
                os._exit(0)

    child(roll)
    return 2


def bomb():
    """As many as the limit allows, and more at once when one is gone."""

    def multiply():
        while True:
            try:
                os.fork()
            except OSError:
                time.sleep(0.02)

    group = f"/sys/fs/cgroup/pids/{os.environ['GROUP']}"
    os.makedirs(group, exist_ok=True)

    def limited():
        with open(f"{group}/pids.max", "w") as limit:
            limit.write("120")
        with open(f"{group}/cgroup.procs", "w") as procs:
            procs.write("0")
        seen()
        multiply()

    child(limited)
    return 2


KINDS = {
    "plain": plain,
    "inherited": inherited,
    "daemon": daemon,
    "stopped": stopped,
    "traced": traced,
    "pid-namespace": lambda: namespace(CLONE_NEWPID),
    "user-namespace": lambda: namespace(CLONE_NEWUSER | CLONE_NEWPID),
    "cleared": cleared,
    "deep": deep,
    "threads": threads,
    "on-term": on_term,
    "guards": guards,
    "reaper": reaper,
    "named": named,
    "nobody": nobody,
    "escaped": escaped,
    "rolling": rolling,
    "bomb": bomb,
}


def main():
    global WITNESS
    kind = sys.argv[1]
    deaf()
    if kind == "witnessed":
        WITNESS = sys.argv[2]
        stay()
    count = KINDS[kind]()
    seen()
    while len([name for name in os.listdir(WITNESS) if not name.startswith(".")]) < count:
        time.sleep(0.01)
    print("up", flush=True)
    if not os.environ.get("LEAVE"):
        while True:
            time.sleep(1000)


main()
