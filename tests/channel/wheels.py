"""Turns wheels into conda packages, and makes wheels of a few bytes.

Owns how the parts of a wheel map to a package: pure ones become `noarch: python`, compiled ones belong to one
minor version of Python. Requirements with a condition are left out, as are extras: no package of the tests needs
one.
"""

from __future__ import annotations

import base64
import configparser
import csv
import email
import hashlib
import io
import re
import subprocess
import sys
import zipfile
from dataclasses import dataclass
from pathlib import Path

from bytecode import with_bytecode
from conda_format import PLACEHOLDER, File, Package, script

REQUIREMENT = re.compile(r"^([A-Za-z0-9][\w.-]*)\s*(?:\[[^\]]*\])?\s*\(?([^;)]*)\)?\s*(;.*)?$")


@dataclass(frozen=True)
class Wheel:
    """A wheel that was read."""

    name: str
    version: str
    requires: tuple[str, ...]
    python: str
    pure: bool
    #: `name = module:function`.
    entry_points: tuple[str, ...]
    #: Paths below `site-packages`, or below the prefix when they begin with `../`.
    files: dict[str, tuple[bytes, int]]


def download(python: str, names: list[str], into: Path) -> list[Path]:
    """Fetches wheels with their requirements from the index that pip is configured for."""
    into.mkdir(parents=True, exist_ok=True)
    command = [python, "-m", "pip", "download", "--quiet", "--only-binary=:all:", "--dest", str(into), *names]
    run = subprocess.run(command, check=False, stdout=sys.stderr)
    if run.returncode != 0:
        raise RuntimeError(f"pip could not fetch {', '.join(names)}; its complaint is above")
    return sorted(into.glob("*.whl"))


def read(path: Path) -> Wheel:
    """Reads a wheel."""
    with zipfile.ZipFile(path) as archive:
        raw = {
            info.filename: (archive.read(info), 0o755 if info.external_attr >> 16 & 0o111 else 0o644)
            for info in archive.infolist()
            if not info.is_dir()
        }
    info_dir = next(name.split("/")[0] for name in raw if name.endswith(".dist-info/METADATA"))
    metadata = email.message_from_bytes(raw[f"{info_dir}/METADATA"][0])
    wheel = email.message_from_bytes(raw[f"{info_dir}/WHEEL"][0])
    console = raw.get(f"{info_dir}/entry_points.txt", (b"", 0))[0].decode()
    files = dict(moved(name, data) for name, data in raw.items())
    claim_ownership(files, info_dir)
    return Wheel(
        name=normal(metadata["Name"]),
        version=metadata["Version"],
        requires=tuple(filter(None, map(requirement, metadata.get_all("Requires-Dist", [])))),
        python=metadata.get("Requires-Python", ">=3.8"),
        pure=wheel["Root-Is-Purelib"].lower() == "true",
        entry_points=tuple(console_scripts(console)),
        files=files,
    )


def moved(name: str, content: tuple[bytes, int]) -> tuple[str, tuple[bytes, int]]:
    """Where a file of a wheel is installed, relative to `site-packages`."""
    match = re.match(r"[^/]+\.data/(\w+)/(.*)", name)
    if not match:
        return name, content
    kind, rest = match.groups()
    if kind in ("purelib", "platlib"):
        return rest, content
    if kind == "scripts":
        data = re.sub(rb"^#!python", f"#!{PLACEHOLDER}/bin/python".encode(), content[0])
        return f"../../../bin/{rest}", (data, 0o755)
    return f"../../../{rest}" if kind == "data" else f"../../../include/{rest}", content


def claim_ownership(files: dict[str, tuple[bytes, int]], info_dir: str) -> None:
    """Says that conda installed it, in the files by which pip knows."""
    installer, record = f"{info_dir}/INSTALLER", f"{info_dir}/RECORD"
    files[installer] = (b"conda\n", 0o644)
    output = io.StringIO()
    rows = csv.writer(output, lineterminator="\n")
    for name, (data, _) in sorted(files.items()):
        if name != record:
            digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
            rows.writerow([name, f"sha256={digest}", len(data)])
    rows.writerow([record, "", ""])
    files[record] = (output.getvalue().encode(), 0o644)


def normal(name: str) -> str:
    """The name as conda writes it."""
    return re.sub(r"[_.]+", "-", name).lower()


def requirement(line: str) -> str | None:
    """A requirement as conda writes it; `None` for one with a condition."""
    match = REQUIREMENT.match(line)
    if not match or match[3]:
        return None
    return f"{normal(match[1])} {match[2].replace(' ', '')}".strip()


def console_scripts(entry_points: str) -> list[str]:
    """The scripts that a wheel asks for."""
    parser = configparser.ConfigParser(delimiters=("=",))
    parser.optionxform = str  # type: ignore[assignment, method-assign]
    parser.read_string(entry_points)
    if not parser.has_section("console_scripts"):
        return []
    return [f"{name} = {value}" for name, value in parser["console_scripts"].items()]


def package(wheel: Wheel, minor: str) -> Package:
    """The package of a wheel, for this minor version of Python if it is compiled."""
    if wheel.pure:
        depends = (f"python {wheel.python.replace(' ', '')}", *wheel.requires)
        return Package(
            wheel.name,
            wheel.version,
            tuple(placed(wheel, "site-packages")),
            depends,
            build="pyh_0",
            subdir="noarch",
            noarch="python",
            entry_points=wheel.entry_points,
        )
    major, lesser = minor.split(".")
    depends = (f"python >={minor},<{major}.{int(lesser) + 1}.0a0", *wheel.requires)
    scripts = [entry_script(point) for point in wheel.entry_points]
    return Package(
        wheel.name,
        wheel.version,
        (*with_bytecode(placed(wheel, f"lib/python{minor}/site-packages"), minor), *scripts),
        depends,
        build=f"py{minor.replace('.', '')}_0",
    )


def placed(wheel: Wheel, site_packages: str) -> list[File]:
    """The files of a wheel where a package has them."""
    up = "../../../"
    files = []
    for name, (data, mode) in sorted(wheel.files.items()):
        path = name.removeprefix(up) if name.startswith(up) else f"{site_packages}/{name}"
        prefixed = PLACEHOLDER if PLACEHOLDER.encode() in data else None
        files.append(File(path, data, mode, prefixed))
    return files


def entry_script(point: str) -> File:
    """A console script of a compiled package."""
    name, _, target = (part.strip() for part in point.partition("="))
    module, _, function = target.partition(":")
    body = (
        f"#!{PLACEHOLDER}/bin/python\nimport sys\nfrom {module} import {function}\nsys.exit({function}())\n"
    )
    return script(f"bin/{name}", body)


def tiny_wheel(into: Path, name: str, version: str, requires: tuple[str, ...] = ()) -> Path:
    """Makes a wheel of one module, which knows its version and has a console script."""
    module = name.replace("-", "_")
    info = f"{module}-{version}.dist-info"
    wants = "".join(f"Requires-Dist: {line}\n" for line in requires)
    files = {
        f"{module}.py": f"__version__ = {version!r}\n\n\ndef main():\n    print({name!r}, __version__)\n",
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n{wants}",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: tests\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        f"{info}/entry_points.txt": f"[console_scripts]\n{name} = {module}:main\n",
    }
    record = "".join(f"{path},,\n" for path in [*files, f"{info}/RECORD"])
    into.mkdir(parents=True, exist_ok=True)
    path = into / f"{module}-{version}-py3-none-any.whl"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for inside, content in {**files, f"{info}/RECORD": record}.items():
            archive.writestr(zipfile.ZipInfo(inside, (1980, 1, 1, 0, 0, 0)), content)
    return path
