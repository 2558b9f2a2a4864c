"""Makes a conda channel for tests, with no conda.

    make.py --tier T0|T1|T2 --out DIR [--python PATH]

T0: packages of a few bytes, see `tiny.py`. T1: an interpreter of this machine, pip, setuptools, wheel and two
packages of one module; `DIR/wheels` holds wheels of the same names for pip. T2: what T1 has, and numpy, scipy and
scikit-learn with what they need, made of the wheels of the index that pip is configured for.

Owns what a tier consists of and when it is made again. Below DIR is one directory per channel and
`channel.json`, which is written last: a call that finds it with the same key has nothing to do. Needs `zstandard`.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent

#: The wheels of a tier, beside the interpreter.
WHEELS = {
    "T1": ["pip", "setuptools", "wheel"],
    "T2": ["pip", "setuptools", "wheel", "numpy", "scipy", "scikit-learn", "joblib", "threadpoolctl"],
}

#: The wheels that are made on the spot: name, version, requirements.
TINY_WHEELS = [
    ("tiny-one", "1.0", ()),
    ("tiny-one", "2.0", ()),
    ("tiny-two", "1.0", ("tiny-one>=1.0",)),
]


def main() -> int:
    """Makes what is asked for, unless it is there."""
    wishes = arguments()
    key = content_key(wishes.tier, wishes.python)
    if made(wishes.out) == key:
        return 0
    wishes.out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".making-", dir=wishes.out.parent) as scratch:
        built = Path(scratch) / "channel"
        built.mkdir()
        try:
            told = make(wishes.tier, wishes.python, built, Path(scratch) / "wheels")
        except RuntimeError as error:
            print(f"make.py: no channel {wishes.tier}: {error}", file=sys.stderr)
            return 1
        manifest = {"key": key, "tier": wishes.tier, **told}
        (built / "channel.json").write_text(json.dumps(manifest, indent=1) + "\n")
        if wishes.out.exists():
            wishes.out.rename(Path(scratch) / "old")
        built.rename(wishes.out)
    return 0


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--tier", required=True, choices=["T0", "T1", "T2"])
    parser.add_argument("--out", required=True, type=Path)
    parser.add_argument("--python", default=sys.executable, help="the interpreter that a package is made of")
    return parser.parse_args()


def content_key(tier: str, python: str) -> str:
    """Changes whenever the channel would be another one."""
    digest = hashlib.sha256(tier.encode())
    for source in sorted(HERE.glob("*.py")):
        if source.name != "serve.py":
            digest.update(source.read_bytes())
    if tier != "T0":
        program = Path(python).resolve()
        stat = program.stat()
        digest.update(f"{program} {stat.st_size} {stat.st_mtime_ns}".encode())
    return digest.hexdigest()


def made(out: Path) -> str | None:
    """The key of what is there."""
    try:
        key = json.loads((out / "channel.json").read_text())["key"]
    except (OSError, ValueError, KeyError):
        return None
    return str(key)


def make(tier: str, python: str, out: Path, scratch: Path) -> dict[str, Any]:
    """Makes all channels of a tier; what the tests need to know about it."""
    import conda_format
    import tiny

    if tier != "T0":
        return make_real(tier, python, out, scratch)
    for name, (packages, subdirs) in tiny.channels().items():
        conda_format.write_channel(out / name, packages, subdirs)
    return {"python": tiny.FAKE_PYTHON, "channels": sorted(tiny.channels())}


def make_real(tier: str, python: str, out: Path, scratch: Path) -> dict[str, Any]:
    """Makes a channel with a working Python."""
    import conda_format
    import interpreter
    import wheels

    found = interpreter.describe(python)
    if found.patched:
        print(
            f"make.py: {found.program} is patched by its distribution; its package relies on libraries of this "
            "machine and works on this machine only",
            file=sys.stderr,
        )
    small = [wheels.tiny_wheel(out / "wheels", *wheel) for wheel in TINY_WHEELS]
    fetched = wheels.download(python, WHEELS[tier], scratch)
    packages = [interpreter.package(found)]
    packages += [wheels.package(wheels.read(path), found.minor) for path in [*small, *fetched]]
    conda_format.write_channel(out / "main", packages, ("linux-64", "noarch"))
    return {"python": found.version, "patched": found.patched, "channels": ["main"]}


if __name__ == "__main__":
    sys.exit(main())
