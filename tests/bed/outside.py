"""The rows of `tests/bed/machine` that are seen from outside: a new machine of a provider, which gets an address by DHCP and
its user data from a disk, becomes a node of a controller that runs here.

Owns the controller, the user's client, and the emulator, which all end with it. The machine is reached by SSH, and reaches
this machine alone, at GATEWAY. The programs here and there are those of the packages.
"""

import functools
import hashlib
import http.server
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import box
from box import tell

WORK, PACKAGES = (Path(argument).resolve() for argument in sys.argv[1:3])
GATEWAY = "10.0.2.2"  # how the emulator's network calls this machine
BOOT = 1500  # seconds; the first boot makes keys, and an emulated machine is slow
# Where the machine itself writes at any time. Attach has nothing there.
ITS_OWN = ("proc", "sys", "dev", "run", "tmp", "var/log", "var/lib/systemd", "var/cache", "var/lib/cloud", "home/ada/.cache")
EACH_BOOT = ("var/tmp/systemd-private-*",)  # what has another name then
ran = functools.partial(box.ran, limit=300)
# A user of another machine has no account on this one, so his job has a number of its own, and its own group.
JOB = re.compile(r"20000\d{5} on bed\n0::/agentjobs\.slice/agent-job-\S+\n")


def eventually(what, ready, limit=300):
    end = time.monotonic() + limit
    while time.monotonic() < end:
        value = ready()
        if value:
            return value
        time.sleep(1)
    raise AssertionError(f"after {limit} s still waiting: {what}")


def free_port():
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]


class Site:
    """A controller with a user, and a machine that is still to be made."""

    def __init__(self):
        (archive,) = PACKAGES.glob("agentd-*-linux-amd64.tar.gz")
        self.archive, self.port, self.ssh_port = archive, free_port(), free_port()
        ran("tar", "-xzf", archive, "-C", WORK, "--strip-components=1")
        self.home = WORK / "home"
        (self.home / ".ssh").mkdir(parents=True)
        self.key = self.home / ".ssh/id_ed25519"
        ran("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", self.key)
        self.socket = WORK / "state/agentd.sock"
        self.environment = {"HOME": str(self.home), "PATH": os.environ["PATH"], "USER": "ada", "NO_COLOR": "1"}
        self.machine = self.server = None
        (WORK / "agentd.yaml").write_text(f"roles: controller\nlisten: 0.0.0.0:{self.port}\ndisk_reserve: 64MiB\n")
        # What it gives out with tokens is its name, so that is what the machine calls it.
        words = f"hostname {GATEWAY} && exec {WORK}/bin/agentd run --user --config {WORK}/agentd.yaml --state-dir {WORK}/state"
        log = (WORK / "controller.log").open("w")
        self.controller = subprocess.Popen(["unshare", "--uts", "sh", "-c", words], env=self.environment, stderr=log, stdout=log)
        eventually("the controller to answer", lambda: self.ctl("nodes", ok=False).returncode == 0)

    def ctl(self, *words, ok=True, limit=300, **more):
        """`agentctl` of who operates the controller."""
        environment = {**self.environment, "AGENTD_SOCKET": str(self.socket)}
        return ran(WORK / "bin/agentctl", *words, ok=ok, limit=limit, env=environment, **more)

    def log_in(self, who):
        code = self.ctl("user", "add", who).stdout
        ran(WORK / "bin/agentctl", "login", f"https://127.0.0.1:{self.port}", env=self.environment, input=code)
        (WORK / "code").mkdir()

    def run(self, script):
        """What a job of the user says, who has logged in; it waits for a node."""
        words = ("--context", "127.0.0.1", "run", "--", "sh", "-c", script)
        return ran(WORK / "bin/agentctl", *words, limit=BOOT, env=self.environment, cwd=WORK / "code").stdout

    def ready(self):
        nodes = json.loads(self.ctl("nodes", "--json").stdout)["nodes"]
        return [node["node"] for node in nodes if node["liveness"] in ("ready", "degraded")]

    def boot(self, user_data):
        seed = WORK / "seed"
        seed.mkdir()
        (seed / "user-data").write_text(user_data)
        (seed / "meta-data").write_text("instance-id: bed-1\nlocal-hostname: bed\n")
        # The image has no other locale than C, and makes none.
        (seed / "vendor-data").write_text("#cloud-config\nlocale: false\n")
        network = f"user,model=virtio-net-pci,hostfwd=tcp:127.0.0.1:{self.ssh_port}-:22"
        disk = f"driver=vvfat,dir={seed},label=cidata,if=virtio,read-only=on"
        log = (WORK / "console.log").open("w")
        command = ["bash", WORK / "emulate", "-nic", network, "-drive", disk]
        self.machine = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)

    def ssh(self, command, ok=True, limit=300):
        """A command of ada on the machine."""
        words = ["ssh", "-p", str(self.ssh_port), "-i", self.key, "-o", "BatchMode=yes", "-o", "StrictHostKeyChecking=accept-new"]
        words += ["-o", f"UserKnownHostsFile={WORK}/known", "-o", "ConnectTimeout=30", "ada@127.0.0.1", command]
        return ran(*words, ok=ok, limit=limit, env=self.environment)

    def serve(self, file):
        """A web server of one directory, with this file in it; gives the file's address with its digest."""
        (WORK / "www").mkdir()
        shutil.copy(file, WORK / "www")
        handler = functools.partial(http.server.SimpleHTTPRequestHandler, directory=WORK / "www")
        handler.log_message = None
        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
        threading.Thread(target=self.server.serve_forever, daemon=True).start()
        digest = hashlib.sha256(file.read_bytes()).hexdigest()
        return f"http://{GATEWAY}:{self.server.server_port}/{file.name}#sha256={digest}"

    def end(self):
        for process in filter(None, (self.machine, self.controller)):
            if process is self.machine:
                os.killpg(process.pid, signal.SIGKILL)
            process.kill()
            process.wait(60)


def row_attach(site):
    """A machine with systemd and an SSH server alone: a node by one command, through a restart, and back to what it was."""
    key = site.key.with_suffix(".pub").read_text().strip()
    user = {"name": "ada", "sudo": "ALL=(ALL) NOPASSWD:ALL", "shell": "/bin/bash", "ssh_authorized_keys": [key]}
    site.boot("#cloud-config\n" + json.dumps({"users": [user], "ssh_genkeytypes": ["ed25519"]}))
    eventually("the machine to let ada in", lambda: site.ssh("true", ok=False).returncode == 0, BOOT)
    site.ssh("cloud-init status --wait", ok=False, limit=BOOT)
    not_ours = " -o ".join(f"-path '/{path}'" for path in ITS_OWN + EACH_BOOT)
    # A file that was written again has another date; a directory has one whenever something in it came and went.
    listing = (
        f"sudo find / -xdev \\( {not_ours} \\) -prune -o -type d -printf '%p %m %u\\n'"
        " -o -printf '%p %m %u %s %T@ %l\\n' | sort; sudo find /var/tmp /run -iname '*agent*' | sort"
    )
    before = site.ssh(listing).stdout.splitlines()
    place = ("ada@127.0.0.1", "--port", str(site.ssh_port), "--key", str(site.key))
    controller = ("--controller", f"https://{GATEWAY}:{site.port}")
    began = time.monotonic()
    site.ctl("attach", *place, *controller, "--package", str(site.archive), "--accept-new", limit=BOOT)
    print(f"  attach {time.monotonic() - began:.0f} s, emulated; {len(before)} files before it", flush=True)
    held = tell("nodes", site.ready(), ["bed"])
    states = "systemctl is-active agentd; systemctl is-enabled agentd; systemctl show -P FragmentPath agentd"
    held += tell("the unit", site.ssh(states).stdout.split(), ["active", "enabled", "/etc/systemd/system/agentd.service"])
    site.log_in("ada")
    said = site.run("echo $(id -u) on $(hostname); cat /proc/self/cgroup /proc/sys/kernel/random/boot_id")
    held += tell("who runs a job, and where", bool(JOB.match(said)), True, said)
    boot = said.split()[-1]
    site.ssh("sudo systemctl reboot", ok=False)
    eventually("the machine to go down", lambda: site.ssh("true", ok=False).returncode != 0)
    again = site.run("cat /proc/sys/kernel/random/boot_id").split()[-1]
    held += tell("a job of another boot", again not in ("", boot), True)
    eventually("the machine to let ada in", lambda: site.ssh("true", ok=False).returncode == 0, BOOT)
    site.ctl("detach", *place, *controller, limit=BOOT)
    held += tell("nodes after detach", json.loads(site.ctl("nodes", "--json").stdout)["nodes"], [])
    left = sorted(set(before) ^ set(site.ssh(listing).stdout.splitlines()))
    held += tell("what detach leaves", left, [])
    return 6, held


def row_cloud_init(site):
    """A machine that gets the user data of a token and nothing else: it fetches the package, joins and runs a job."""
    (package,) = PACKAGES.glob("agentd_*_amd64.deb")
    made = site.ctl("token", "create", "--for", "3h", "--cloud-init", site.serve(package)).stdout
    began = time.monotonic()
    site.boot(made)
    eventually("a node", site.ready, BOOT)
    print(f"  a node {time.monotonic() - began:.0f} s after power on, emulated", flush=True)
    held = tell("nodes", site.ready(), ["bed"])
    site.log_in("ada")
    # Nobody can log in there; a job sees files, and no other processes.
    script = (
        "readlink /etc/systemd/system/multi-user.target.wants/agentd.service; stat -c %U /var/lib/agentd;"
        "ls -d /run/agentd-join /var/cache/agentd-join.deb 2>/dev/null; cloud-init status --wait | tail -n 1"
    )
    due = ["/lib/systemd/system/agentd.service", "agentd", "status: done", ""]
    held += tell("service, whose state, what is left, verdict", site.run(script).split("\n"), due)
    token = re.search(r"agentd-join-\S+?(?=')", made).group()
    listed = site.ctl("token", "list").stdout
    held += tell("the token", (token in listed, "used up" in listed), (False, True))
    return 3, held


ROWS = {
    "attach": ("by SSH a machine with systemd is a node, through a restart, then as before", row_attach),
    "cloud-init": ("by user data a new machine fetches the package and is a node", row_cloud_init),
}


def main():
    name = sys.argv[3]
    what, row = ROWS[name]
    began, site = time.monotonic(), None
    tried, held = 1, 0
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    try:
        site = Site()
        tried, held = row(site)
    except Exception as error:  # whatever broke, the row did not hold, and its processes are ended all the same
        print(f"  {name}: {type(error).__name__}: {error}")
    finally:
        if site:
            site.end()
    print(f"bed: {name:<14} {what:<80} {tried:>3} {held:>3} {time.monotonic() - began:>6.0f} s")
    print("bed: all survived" if tried == held else "bed: something did not survive")
    sys.exit(tried != held)


main()
