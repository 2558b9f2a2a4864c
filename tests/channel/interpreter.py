"""Makes a relocatable conda package of an interpreter of this machine.

Owns what of an installed CPython goes into the package and how it is made to work anywhere. An interpreter built
from the sources of CPython is taken as it is. The one of Debian and its relatives is patched to look for packages
in `dist-packages`; as its site module is frozen into the program, that is undone by a `sitecustomize` and by a
few lines after its `sysconfig`. It also relies on libraries of the system, so such an environment works on the
machine it was made on, not in a bare container.
"""

from __future__ import annotations

import json
import re
import struct
import subprocess
from dataclasses import dataclass
from pathlib import Path

from bytecode import with_bytecode
from conda_format import PLACEHOLDER, File, Link, Package, text

#: What of the standard library nobody needs in an environment.
LEFT_OUT = {
    "__pycache__", "dist-packages", "ensurepip", "idlelib", "lib2to3", "site-packages", "sitecustomize.py",
    "test", "tests", "tkinter", "turtledemo", "EXTERNALLY-MANAGED",
}  # fmt: skip

#: Libraries that belong to the C library, hence to the machine; and those that would need more than themselves.
NOT_TAKEN = re.compile(
    r"(ld-linux|linux-vdso|lib(c|m|pthread|dl|rt|util|nsl|tirpc|resolv|python[\d.]*|readline|ncursesw?|tinfo|"
    r"panelw?|tcl[\d.]*|tk[\d.]*|X\w+|gdbm\w*|db-[\d.]*))(-|\.so|\.)"
)

DESCRIBE = """
import json, sys, sysconfig
print(json.dumps({
    "version": ".".join(map(str, sys.version_info[:3])),
    "prefix": sys.base_prefix,
    "stdlib": sysconfig.get_path("stdlib"),
    "patched": "deb_system" in sysconfig.get_scheme_names(),
}))
"""

SITECUSTOMIZE = '''"""Looks for packages where conda puts them; this Python was built to look elsewhere."""
import site
import sys

_DIRECTORY = f"{sys.prefix}/lib/python{sys.version_info[0]}.{sys.version_info[1]}/site-packages"
site.getsitepackages = lambda prefixes=None: [_DIRECTORY]
if _DIRECTORY not in sys.path:
    site.addsitedir(_DIRECTORY)
'''

SYSCONFIG = """
# The schemes of the distribution are those of CPython in this package.
for _scheme in ("posix_local", "deb_system"):
    if _scheme in _INSTALL_SCHEMES:
        _INSTALL_SCHEMES[_scheme] = dict(_INSTALL_SCHEMES["posix_prefix"])
"""


class Unsuitable(RuntimeError):
    """An interpreter that no package can be made of; the text says why and what to do."""


@dataclass(frozen=True)
class Interpreter:
    """An interpreter of this machine."""

    version: str
    prefix: Path
    stdlib: Path
    #: Whether it is one of Debian or a relative.
    patched: bool

    @property
    def minor(self) -> str:
        """Its version without the last number."""
        return ".".join(self.version.split(".")[:2])

    @property
    def program(self) -> Path:
        """The program itself."""
        return (self.prefix / "bin" / f"python{self.minor}").resolve()


def describe(python: str) -> Interpreter:
    """Asks an interpreter what it is."""
    run = subprocess.run([python, "-I", "-c", DESCRIBE], check=False, capture_output=True, text=True)
    if run.returncode != 0:
        raise Unsuitable(f"{python} does not run: {run.stderr.strip()}")
    told = json.loads(run.stdout)
    found = Interpreter(told["version"], Path(told["prefix"]), Path(told["stdlib"]), told["patched"])
    if not found.program.is_file():
        raise Unsuitable(f"{python} has no {found.program}; choose another one with --python")
    if found.stdlib.parent != found.prefix / "lib":
        raise Unsuitable(
            f"{python} keeps its library in {found.stdlib}, and only {found.prefix}/lib is understood; "
            "choose one built from the sources of CPython with --python"
        )
    return found


def package(python: Interpreter) -> Package:
    """The package `python` of this interpreter."""
    entries: list[File | Link] = [
        program(python),
        Link("bin/python", f"python{python.minor}"),
        Link("bin/python3", f"python{python.minor}"),
        text(f"lib/python{python.minor}/site-packages/README.txt", "packages come here\n"),
        *with_bytecode(library(python), python.minor),
    ]
    if python.patched:
        entries.append(text(f"lib/python{python.minor}/sitecustomize.py", SITECUSTOMIZE))
    else:
        entries += [*shared(python), *headers(python), *borrowed(python)]
    return Package("python", python.version, tuple(entries), build=f"{python.minor.replace('.', '')}_0")


def program(python: Interpreter) -> File:
    """The program, which must find the libraries of its own prefix."""
    data = bytearray(python.program.read_bytes())
    moved = set_run_path(data, b"$ORIGIN/../lib")
    needs_library = f"libpython{python.minor}.so".encode() in data
    if needs_library and not moved:
        raise Unsuitable(
            f"{python.program} finds its library through the system; choose one with --python that was built "
            "with a run path, or without --enable-shared"
        )
    return File(f"bin/python{python.minor}", bytes(data), 0o755)


def library(python: Interpreter) -> list[File | Link]:
    """The standard library."""
    base = f"lib/python{python.minor}"
    found: list[File | Link] = []
    for path in sorted(python.stdlib.rglob("*")):
        inside = path.relative_to(python.stdlib)
        unneeded = any(part in LEFT_OUT or part.startswith("config-") for part in inside.parts)
        if unneeded or not path.is_file() or "_test" in path.name and path.suffix == ".so":
            continue
        found.append(entry(python, path, f"{base}/{inside}", b"$ORIGIN/../.."))
    return found


def shared(python: Interpreter) -> list[File | Link]:
    """The interpreter as a library, if it is one."""
    found: list[File | Link] = []
    for path in sorted((python.prefix / "lib").glob("libpython*.so*")):
        if path.is_symlink():
            found.append(Link(f"lib/{path.name}", path.readlink().name))
        else:
            found.append(entry(python, path, f"lib/{path.name}", b"$ORIGIN"))
    return found


def headers(python: Interpreter) -> list[File | Link]:
    """What extension modules are compiled with."""
    include = python.prefix / "include" / f"python{python.minor}"
    paths = sorted(path for path in include.rglob("*.h") if path.is_file())
    return [entry(python, path, f"include/{path.relative_to(include.parent)}", b"") for path in paths]


def borrowed(python: Interpreter) -> list[File | Link]:
    """The libraries of this machine that the standard library is linked against, without the C library."""
    modules = sorted(str(path) for path in (python.stdlib / "lib-dynload").glob("*.so"))
    if not modules:
        return []
    listing = subprocess.run(["ldd", *modules], check=False, capture_output=True, text=True).stdout
    found = dict(re.findall(r"^\s*(\S+) => (/\S+)", listing, re.MULTILINE))
    taken = {name: Path(path) for name, path in found.items() if not NOT_TAKEN.match(name)}
    return [File(f"lib/{name}", path.read_bytes(), 0o755) for name, path in sorted(taken.items())]


def entry(python: Interpreter, path: Path, name: str, run_path: bytes) -> File:
    """A file of the interpreter, made to work in any prefix."""
    data = path.read_bytes()
    mode = 0o755 if path.stat().st_mode & 0o111 else 0o644
    if data.startswith(b"\x7fELF"):
        moved = bytearray(data)
        set_run_path(moved, run_path)
        return File(name, bytes(moved), mode)
    if python.patched:
        return File(name, data + SYSCONFIG.encode() if is_sysconfig(name) else data, mode)
    prefix = str(python.prefix).encode()
    if prefix in data and b"\x00" not in data:
        return File(name, data.replace(prefix, PLACEHOLDER.encode()), mode, PLACEHOLDER)
    return File(name, data, mode)


def is_sysconfig(name: str) -> bool:
    """Whether this file says where packages are installed to."""
    return name.endswith(("/sysconfig.py", "/sysconfig/__init__.py")) and "distutils" not in name


def set_run_path(elf: bytearray, value: bytes) -> bool:
    """Overwrites the run path of a 64-bit program or library in place; whether it had one."""
    if elf[:5] != b"\x7fELF\x02":
        return False
    (header_at,) = struct.unpack_from("<Q", elf, 32)
    size, count = struct.unpack_from("<HH", elf, 54)
    segments = [struct.unpack_from("<IIQQQQ", elf, header_at + n * size) for n in range(count)]
    loaded = [(address, offset, length) for kind, _, offset, address, _, length in segments if kind == 1]
    dynamic = next(((offset, length) for kind, _, offset, _, _, length in segments if kind == 2), None)
    if dynamic is None:
        return False
    tags = [struct.unpack_from("<QQ", elf, at) for at in range(dynamic[0], sum(dynamic), 16)]
    strings = next((address for tag, address in tags if tag == 5), 0)
    start = next((o + strings - a for a, o, length in loaded if a <= strings < a + length), None)
    run_paths = [start + at for tag, at in tags if tag in (15, 29) and start is not None]
    for at in run_paths:
        room = elf.index(0, at) - at
        if len(value) > room:
            raise Unsuitable(f"a run path of {room} bytes has no room for {value.decode()}")
        elf[at : at + room] = value.ljust(room, b"\x00")
    return bool(run_paths)
