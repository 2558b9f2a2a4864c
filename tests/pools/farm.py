#!/usr/bin/env python3
"""A provider whose machines are daemons of this machine. A file says in which mood it is."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time

ASKED = json.load(sys.stdin)
HOME = ASKED["settings"]["home"]
AGENTD = ASKED["settings"]["agentd"]
MACHINES = os.path.join(HOME, "machines")


def mood():
    try:
        with open(os.path.join(HOME, "mood"), encoding="utf-8") as file:
            return file.read().split()
    except FileNotFoundError:
        return []


def note(words):
    with open(os.path.join(HOME, "calls"), "a", encoding="utf-8") as file:
        file.write(" ".join(words) + "\n")


def answer(what):
    print(json.dumps(what))
    sys.exit()


def fail(kind, message):
    answer({"error": {"kind": kind, "message": message}})


def start(machine_id, name):
    """Joins and runs a daemon in a session of its own, which outlives this call."""
    home = os.path.join(MACHINES, machine_id)
    os.makedirs(os.path.join(home, "state"))
    for file, text in [
        ("request", ASKED["request"]),
        ("name", name),
        ("token", ASKED["join"]["token"]),
        ("agentd.yaml", f"roles: node\nnode_name: {name}\nslots: {ASKED['node'].get('slots') or 1}\ndisk_reserve: 64MiB\n"),
    ]:
        with open(os.path.join(home, file), "w", encoding="utf-8") as out:
            out.write(text)
    if "dead" in mood():
        return
    words = f"--user --config {home}/agentd.yaml --state-dir {home}/state"
    script = (
        f"while grep -qs asleep {HOME}/mood; do sleep 0.1; done; "
        f"until {AGENTD} join {ASKED['join']['address']} --token-file {home}/token {words} >{home}/join.log 2>&1; do sleep 1; done; "
        f"exec {AGENTD} run {words} >{home}/agentd.log 2>&1"
    )
    variables = {**os.environ, "XDG_DATA_HOME": home, "HOME": home}
    null = subprocess.DEVNULL
    subprocess.Popen(
        ["/bin/sh", "-c", script], stdin=null, stdout=null, stderr=null, env=variables, start_new_session=True
    )


def read(machine_id, file):
    with open(os.path.join(MACHINES, machine_id, file), encoding="utf-8") as text:
        return text.read()


def there():
    return sorted(os.listdir(MACHINES)) if os.path.isdir(MACHINES) else []


def create():
    if "quota" in mood():
        fail("quota", "no more machines of this kind today")
    found = [one for one in there() if read(one, "request") == ASKED["request"]]
    if found:
        answer({"id": found[0]})
    start(ASKED["name"], ASKED["name"])
    if "twice" in mood():
        start("second-" + ASKED["name"], "second-" + ASKED["name"])
    if "fails-after" in mood():
        log = os.path.join(MACHINES, ASKED["name"], "agentd.log")
        while not os.path.exists(log):
            time.sleep(0.1)
        time.sleep(3)
        fail("temporary", "connection reset by peer")
    if "late" in mood():
        time.sleep(600)
    if "garbage" in mood():
        print("Creating... done")
        sys.exit()
    answer({"id": ASKED["name"]})


def processes(home):
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            with open(f"/proc/{pid}/cmdline", "rb") as line, open(f"/proc/{pid}/environ", "rb") as variables:
                if home.encode() in line.read() + variables.read():
                    yield int(pid)
        except OSError:
            continue


def delete():
    if "stubborn" in mood():
        fail("temporary", "it does not want to go")
    for one in there():
        if one == ASKED.get("id") or (ASKED.get("id") is None and read(one, "request") == ASKED["request"]):
            home = os.path.join(MACHINES, one)
            while pids := [pid for pid in processes(home + "/") if pid != os.getpid()]:
                for pid in pids:
                    try:
                        os.kill(pid, signal.SIGKILL)
                    except ProcessLookupError:
                        pass
                time.sleep(0.02)
            shutil.rmtree(home, ignore_errors=True)
    answer({})


def listed():
    if "blind" in mood():
        print("Listing... done")
        sys.exit(1)
    if "forget" in mood():
        answer({"machines": []})
    answer({
        "machines": [
            {"id": one, "request": read(one, "request"), "name": read(one, "name"), "state": "running"}
            for one in there()
        ]
    })


note([sys.argv[1], ASKED.get("request", "")])
{"create": create, "delete": delete, "list": listed}[sys.argv[1]]()
