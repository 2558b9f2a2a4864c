"""What the programs of this directory share: settings are read, commands are run, and one answer is written.

A program gives `serve` a function for each verb. It takes what was asked and returns the answer, or raises `Failure`.
Everything else that goes wrong is an exception, whose last line says what it was, and an exit status of 1.
"""

import json
import re
import shlex
import subprocess
import sys

# What clouds and clusters say when there is nothing left to give.
QUOTA = re.compile(
    r"quota|InsufficientInstanceCapacity|InsufficientCapacity|LimitExceeded|SkuNotAvailable|AllocationFailed"
    r"|ZonalAllocationFailed|ZONE_RESOURCE_POOL_EXHAUSTED|RESOURCE_EXHAUSTED|QOSMax|AssocMax|AssocGrp|QOSGrp",
    re.IGNORECASE,
)


class Failure(Exception):
    """An answer that says what is wrong: `quota`, `temporary` or `permanent`, and words for people."""

    def __init__(self, kind, message):
        super().__init__(message)
        self.kind = kind


def failed(message):
    """A failure whose kind is what the words of a command tell."""
    return Failure("quota" if QUOTA.search(message) else "temporary", message)


def note(message):
    """Says what goes on: the last of it is told if the time is over."""
    print(message, file=sys.stderr, flush=True)


def serve(create, list, delete):
    """Does what the command line and standard input ask."""
    verbs = {"create": create, "list": list, "delete": delete}
    if len(sys.argv) != 2 or sys.argv[1] not in verbs:
        sys.exit(f"usage: {sys.argv[0]} create|list|delete, with a JSON document on standard input")
    asked = json.load(sys.stdin)
    try:
        answer = verbs[sys.argv[1]](asked)
    except Failure as failure:
        answer = {"error": {"kind": failure.kind, "message": str(failure)}}
    json.dump(answer, sys.stdout)
    print()


class Settings:
    """The settings of a provider, each taken once; `done` refuses those that nobody took."""

    def __init__(self, asked):
        self.left = dict(asked["settings"])

    def take(self, key, *default):
        value = self.left.pop(key, None)
        if value is None:
            if not default:
                raise Failure("permanent", f"the setting `{key}` is missing")
            return default[0]
        return value

    def text(self, key, *default):
        value = self.take(key, *default)
        if value is not None and not isinstance(value, (str, int, float)):
            raise Failure("permanent", f"the setting `{key}` must be a text")
        return value if value is None else str(value)

    def number(self, key, *default):
        text = self.text(key, *default)
        if text is not None and not str(text).isdigit():
            raise Failure("permanent", f"the setting `{key}` must be a whole number, not `{text}`")
        return text if text is None else int(text)

    def flag(self, key):
        text = str(self.take(key, "false")).lower()
        if text not in ("true", "yes", "on", "false", "no", "off"):
            raise Failure("permanent", f"the setting `{key}` must be `true` or `false`, not `{text}`")
        return text in ("true", "yes", "on")

    def words(self, key, *default):
        """A command line, as a list or as one text with the quotes of a shell."""
        value = self.take(key, *default)
        if isinstance(value, str):
            return shlex.split(value)
        if value is not None and not (isinstance(value, list) and all(isinstance(word, (str, int)) for word in value)):
            raise Failure("permanent", f"the setting `{key}` must be a list of words")
        return value if value is None else [str(word) for word in value]

    def done(self):
        if self.left:
            raise Failure("permanent", f"there is no setting `{sorted(self.left)[0]}`")


def run(argv, input=None, check=True, **more):
    """Runs a command to its end. Its standard error is passed on; with `check`, one that fails is a failure."""
    if input is not None:
        more["input"] = input if isinstance(input, bytes) else input.encode()
    else:
        more.setdefault("stdin", subprocess.DEVNULL)
    try:
        done = subprocess.run(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, **more)
    except OSError as error:
        raise Failure("permanent", f"{argv[0]} does not start: {error.strerror}")
    done.stdout, done.stderr = (text.decode(errors="replace") for text in (done.stdout, done.stderr))
    if check and done.returncode != 0:
        said = " | ".join((done.stderr or done.stdout).strip().splitlines()[-3:])
        raise failed(f"{argv[0]} failed: {said or f'exit status {done.returncode}'}")
    return done
