"""Rows of `guest.py` about jobs in containers, under an engine that systemd runs with its own cgroup driver.

The engine is Debian's, started by the first row that needs it; its one image is made here of the static busybox.
Nothing is asked through the product that the engine, systemd or the kernel can say themselves: which containers there
are, which group a container has, and who is in it.
"""

import functools
import io
import json
import shutil
import tarfile
from pathlib import Path

from box import (
    CGROUPS,
    ENDED,
    answers,
    ctl,
    eventually,
    first_line,
    is_populated,
    log,
    ran,
    show,
    start_agent,
    state,
    submit,
    systemctl,
    tell,
    wait_for,
    why,
)

IMAGE = "bed/busybox:1"
UNITS = ("docker.socket", "docker.service")


def image_root():
    """The archive of a root directory that has a shell, the usual tools and an account, and nothing else."""
    held = io.BytesIO()
    with tarfile.open(fileobj=held, mode="w") as archive:

        def add(name, kind, mode=0o755, link="", body=b""):
            entry = tarfile.TarInfo(name)
            entry.type, entry.mode, entry.linkname, entry.size = kind, mode, link, len(body)
            archive.addfile(entry, io.BytesIO(body))

        for directory in ("bin", "etc"):
            add(directory, tarfile.DIRTYPE)
        add("tmp", tarfile.DIRTYPE, 0o1777)
        add("etc/passwd", tarfile.REGTYPE, 0o644, body=b"root:x:0:0::/:/bin/sh\nnobody:x:65534:65534::/:/bin/sh\n")
        add("bin/busybox", tarfile.REGTYPE, body=Path("/bin/busybox").read_bytes())
        for tool in ran("/bin/busybox", "--list").stdout.split():
            if tool != "busybox":
                add(f"bin/{tool}", tarfile.SYMTYPE, link="busybox")
    return held.getvalue()


def engine_answers():
    return ran("docker", "info", ok=False).returncode == 0


def start_engine():
    ran("systemctl", "reset-failed", *UNITS, "containerd", ok=False)
    systemctl("start", *UNITS)
    eventually("the engine to answer", engine_answers)


def stop_engine():
    """Both units: whoever calls at its socket would start it again."""
    systemctl("stop", *UNITS)


@functools.cache
def engine():
    """Starts the engine, which must be of the kind these rows are about, and makes the image; once."""
    start_engine()
    kind = ran("docker", "info", "-f", "{{.CgroupDriver}} {{.CgroupVersion}} {{.LiveRestoreEnabled}}").stdout.strip()
    if kind != "systemd 2 true":
        raise AssertionError(f"the engine is of another kind: {kind}")
    archive = Path("/root/image.tar")
    archive.write_bytes(image_root())
    ran("docker", "import", "--change", "ENV PATH=/bin", str(archive), IMAGE)


def submit_in_image(command, **resources):
    engine()
    return submit("sh job.sh", {"image": IMAGE}, {"job.sh": command}, **resources)


def containers(job):
    """The engine's names of the containers of a job, running or not."""
    return ran("docker", "ps", "--all", "--quiet", "--no-trunc", "--filter", f"label=agentd.job={job}").stdout.split()


def group_of(container):
    """Where systemd has put a container."""
    return CGROUPS / f"system.slice/docker-{container}.scope"


def running(job):
    """Waits until a job runs, and gives its only container."""
    wait_for(job, "Running")
    found = containers(job)
    if len(found) != 1:
        raise AssertionError(f"{job} has the containers {found}")
    return found[0]


def nothing_left(job):
    eventually(f"the container of {job} to be gone", lambda: not containers(job))


def cancel(job):
    ctl("cancel", job)
    wait_for(job, "Canceled")


# What a job does that should be seen outside: both streams, an output, a metric.
GIVES = """echo to the log
echo to the log too >&2
echo kept > outputs/kept
echo '{"metric": "speed", "value": 2}' >> $AGENTD_METRICS
"""


def row_image():
    job = submit_in_image(GIVES)
    wait_for(job, "Completed")
    metrics = json.loads(ctl("metrics", job, "--json"))["metrics"]
    kept = Path("/root/kept")
    shutil.rmtree(kept, ignore_errors=True)
    ctl("download", job, "-o", str(kept))
    held = tell("log", log(job), "to the log\nto the log too\n")
    held += tell("metrics", [(metric["name"], metric["last"]) for metric in metrics], [("speed", 2.0)])
    held += tell("outputs", [found.read_text() for found in kept.rglob("kept") if found.is_file()], ["kept\n"])
    nothing_left(job)
    return 3, held


# By file of the container's group: what limits what the job asks for, and what it need not ask for.
LIMITS = {
    "memory.max": str(96 << 20),
    "memory.swap.max": str(64 << 10),
    "cpu.max": "50000 100000",
    "pids.max": "32768",
}


def limits_of(group):
    return {file: (group / file).read_text().strip() for file in LIMITS}


def row_limits():
    look = f"cd /sys/fs/cgroup; for file in {' '.join(LIMITS)}; do echo $file $(cat $file); done; echo end; sleep 1000"
    job = submit_in_image(look, memory="96MiB", docker_args="--cpus=0.5")
    container = running(job)
    group = group_of(container)
    held = tell("limits", limits_of(group), LIMITS)
    # systemd sets them anew from what it was told of them.
    systemctl("daemon-reload")
    held += tell("limits after a reload of systemd", limits_of(group), LIMITS)
    eventually(f"{job} to have looked", lambda: log(job).endswith("end\n"))
    inside = dict(line.split(" ", 1) for line in log(job).splitlines()[:-1])
    held += tell("as seen from inside", inside, LIMITS)
    # The supervisor, the command and what the command started are all in there.
    held += tell("processes", len((group / "cgroup.procs").read_text().split()) >= 3, True)
    cancel(job)
    eventually("its group to be gone", lambda: not group.exists())
    nothing_left(job)
    return 5, held + 1


ALLOCATE = "awk 'BEGIN { text = \"0123456789abcdef\"; while (1) text = text text }'"

OOM_CASES = [
    ("main", f"exec {ALLOCATE}", "RUN-104"),
    ("child", f"{ALLOCATE}; exit 1", "RUN-104"),
    ("shared memory", "dd if=/dev/zero of=/dev/shm/filled bs=1M count=400; exit 1", "RUN-104"),
    ("exit 137", "exit 137", "RUN-101"),
    ("kill -9", "kill -9 $$", "RUN-103"),
    ("child killed", "sh -c 'kill -9 $$'; exit 1", "RUN-101"),
]


def row_oom():
    held = 0
    for name, command, code in OOM_CASES:
        job = submit_in_image(command, memory="96MiB")
        wait_for(job, "Failed")
        held += tell(name, show(job)["fault"]["code"], code, why(job))
        nothing_left(job)
    by_hand = submit_in_image("echo up; sleep 1000", memory="96MiB")
    first_line(by_hand)
    ran("docker", "kill", running(by_hand))
    wait_for(by_hand, "Failed")
    held += tell("killed by hand", show(by_hand)["fault"]["code"], "RUN-107", why(by_hand))
    nothing_left(by_hand)
    return len(OOM_CASES) + 1, held


DEAF = "trap '' TERM INT HUP\n"

TREES = {
    "deaf": DEAF + "echo up\nwhile true; do sleep 1; done",
    "orphans in sessions of their own": "(setsid sh -c 'sleep 900 & sleep 900' &)\necho up\nsleep 900",
    "many deaf ones": DEAF
    + "i=0\nwhile [ $i -lt 30 ]; do setsid sh -c 'while true; do sleep 60; done' & i=$((i+1)); done\necho up\nwait",
    "without the variables of the job": "(env -i setsid /bin/sleep 900 &)\necho up\nsleep 900",
    "stopped": "sh -c 'kill -STOP $$; sleep 900' &\necho up\nsleep 900",
    "more of them when asked to end": "trap 'sleep 900 & sleep 900 & sleep 900 &' TERM\n"
    "echo up\nwhile true; do sleep 1; done",
    "never the same ones": "again() { sleep 0.1; again & exit 0; }\nagain & again & again &\necho up\nsleep 900",
    "one that kills what it can": DEAF + "echo up\nwhile true; do kill -9 1; kill -TERM 1; sleep 1; done",
}


def row_cancel():
    held = 0
    for name, tree in TREES.items():
        job = submit_in_image(tree)
        eventually(f"{job} to be up", lambda: log(job).startswith("up\n"))
        group = group_of(running(job))
        cancel(job)
        eventually(f"no process to be left of: {name}", lambda: not is_populated(group))
        held += 1
        nothing_left(job)
    return len(TREES), held


# It counts until it is told to stop, so that no machine is too slow for all that happens meanwhile.
COUNT = "i=0; while [ ! -e outputs/stop ]; do echo $i; i=$((i+1)); sleep 0.1; done; echo end"


def kill_agent():
    systemctl("kill", "-s", "KILL", "agentd")
    start_agent()


def restart_agent():
    systemctl("restart", "agentd")
    eventually("the daemon to answer", answers)


def kill_engine():
    systemctl("kill", "-s", "KILL", "docker")
    start_engine()


def restart_engine():
    systemctl("restart", "docker")
    eventually("the engine to answer", engine_answers)


def restart_containerd():
    systemctl("restart", "containerd")
    start_engine()


def both_away():
    stop_engine()
    restart_agent()
    start_engine()


SERVICE_ACTS = [restart_agent, kill_agent, restart_engine, kill_engine, restart_containerd, both_away]


def row_service():
    """Whatever is restarted or killed meanwhile: the same container, one attempt, every line once."""
    job = submit_in_image(COUNT)
    first_line(job)
    container = running(job)
    held = 0
    for act in SERVICE_ACTS:
        lines = len(log(job).splitlines())
        act()
        eventually(f"{job} to count on after {act.__name__}", lambda: len(log(job).splitlines()) > lines)
        held += tell(act.__name__, (state(job), containers(job)), ("Running", [container]), why(job))
    (work_dir(container) / "outputs/stop").touch()
    wait_for(job, "Completed")
    said = log(job).splitlines()
    held += tell("log", said, [str(number) for number in range(len(said) - 1)] + ["end"])
    held += tell("attempt", show(job)["attempt"], 1, why(job))
    nothing_left(job)
    return len(SERVICE_ACTS) + 2, held


def work_dir(container):
    """The working directory of the job in a container."""
    mounts = json.loads(ran("docker", "inspect", "-f", "{{json .Mounts}}", container).stdout)
    return next(Path(mount["Source"]) / "work" for mount in mounts if mount["RW"])


def finding():
    """What the node says of its engine."""
    node = json.loads(ctl("nodes", "--json"))["nodes"][0]
    return next(found["grade"] for found in node["inventory"]["findings"] if found["topic"] == "docker")


def row_away():
    """Without its engine the node says so and works; what waits for the engine is done when it is back."""
    engine()
    eventually("the node to find the engine", lambda: finding() == "good")
    stop_engine()
    eventually("the node to miss the engine", lambda: finding() != "good")
    waiting = submit_in_image("echo at last")
    on_machine = submit("echo on the machine")
    wait_for(on_machine, "Completed")
    eventually("the job to say what it waits for", lambda: "container engine" in show(waiting)["detail"].lower())
    held = tell("state of the one that waits", state(waiting) in ENDED, False, why(waiting))
    start_engine()
    wait_for(waiting, "Completed")
    held += tell("log", log(waiting), "at last\n")
    held += tell("attempt", show(waiting)["attempt"], 1, why(waiting))
    eventually("the node to find it again", lambda: finding() == "good")
    # Only its socket is there: systemd starts it when somebody calls, and it is slow to come.
    systemctl("stop", "docker.service")
    called = submit_in_image("echo called")
    wait_for(called, "Completed")
    held += tell("attempt of the one that called", show(called)["attempt"], 1, why(called))
    nothing_left(called)
    return 4, held


ROWS = {
    "image": ("a job in an image gives its log, metrics and outputs", row_image),
    "image-limits": ("its limits are the kernel's, in the container's own group", row_limits),
    "image-oom": ("out of memory is told from SIGKILL and from 137 there too", row_oom),
    "image-cancel": ("cancel leaves no process of a container", row_cancel),
    "image-service": ("restarts and kills of agent and engine leave the job", row_service),
    "image-away": ("a node whose engine is stopped says so and works", row_away),
}
