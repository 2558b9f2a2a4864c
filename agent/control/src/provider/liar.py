#!/usr/bin/env python3
"""A provider's program that does what its setting `case` says, right or wrong; for tests.

It remembers in its directory which machines it made: a file MACHINES of JSON lines.
"""

import json
import os
import signal
import subprocess
import sys
import time

LONG = 600  # seconds: longer than any deadline of a test


def say(answer):
    print(json.dumps(answer), flush=True)


def machines():
    try:
        with open("MACHINES") as file:
            return [json.loads(line) for line in file]
    except FileNotFoundError:
        return []


def make(asked):
    machine = {"id": f"m{len(machines()) + 1}", "request": asked["request"], "name": asked["name"], "state": "creating"}
    with open("MACHINES", "a") as file:
        file.write(json.dumps(machine) + "\n")
    return machine["id"]


def behind(session=False):
    """Starts a process that keeps everything open for a while; its number is in the file CHILD."""
    child = subprocess.Popen(["sleep", "20" if session else str(LONG)], start_new_session=session)
    with open("CHILD", "w") as file:
        file.write(str(child.pid))


def honest(verb, asked):
    if verb == "list":
        return say({"machines": machines()})
    if verb == "delete":
        left = [one for one in machines() if asked.get("id") != one["id"]]
        with open("MACHINES", "w") as file:
            file.writelines(json.dumps(one) + "\n" for one in left)
        return say({})
    known = [one["id"] for one in machines() if one["request"] == asked["request"]]
    return say({"id": known[0] if known else make(asked)})


def main():
    verb = sys.argv[1]
    if os.path.exists("DEAF"):
        return say({"id": "m1"})
    asked = json.load(sys.stdin)
    case = asked["settings"]["case"]
    if case == "honest":
        honest(verb, asked)
    elif case == "hangs":
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)
        behind()
        print("still at it", file=sys.stderr, flush=True)
        time.sleep(LONG)
    elif case == "answers late":
        # It has ordered the machine when its time is over.
        if verb != "create" or machines():
            return honest(verb, asked)
        make(asked)
        time.sleep(LONG)
    elif case == "creates twice":
        if verb == "create":
            make(asked)
        honest(verb, asked)
    elif case == "forgets":
        honest(verb, asked)
        if verb == "create":
            os.remove("MACHINES")
    elif case == "closes":
        sys.stdout.close()
        sys.stderr.close()
        os.closerange(0, 3)
        time.sleep(LONG)
    elif case == "pieces":
        for byte in json.dumps({"id": "m1"}):
            os.write(1, byte.encode())
            time.sleep(0.02)
    elif case in ("fork holds", "session holds"):
        behind(session=case == "session holds")
        say({"id": "m1"})
    elif case == "too much":
        while True:
            os.write(1, b"x" * 65536)
    elif case == "loud":
        for number in range(30000):
            print(f"line {number}", file=sys.stderr)
        say({"id": "m1"})
    elif case == "says the token":
        print(f"+ curl -H {asked['join']['token']}", file=sys.stderr)
        say({"error": {"kind": "permanent", "message": f"bad: {asked['join']['token']}"}})
    elif case == "shouts the token":
        sys.exit(f"bad: {asked['join']['token']}")
    elif case == "dies":
        os.kill(os.getpid(), signal.SIGKILL)
    elif case == "fails":
        print("a\n\x1b[31mno network\x1b[0m", file=sys.stderr)
        sys.exit(3)
    elif case == "tells":
        say({"id": "m1"})
        with open("TOLD", "w") as file:
            json.dump({"argv": sys.argv[1:], "env": dict(os.environ), "cwd": os.getcwd(), "asked": asked}, file)
    elif case == "no text":
        os.write(1, b'{"id": "\xff\xfe"}')
    elif case == "deep":
        os.write(1, b"[" * 100000)
    else:
        os.write(1, case.encode())


main()
