"""Conda's file formats, as far as tests need them: packages (`.conda` and `.tar.bz2`) and `repodata.json`.

Owns how a package becomes bytes. Knows nothing about what the packages are for, and writes whatever it is told,
also what no honest builder would write: that is what the tests of hostile packages need. The same package always
becomes the same bytes.
"""

from __future__ import annotations

import bz2
import hashlib
import io
import json
import tarfile
import zipfile
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import zstandard

#: What stands for the prefix in the files of a package: as long as in the channels of the world.
PLACEHOLDER = "/opt/placeholder".ljust(255, "_")

#: A moment all packages claim to be from, in milliseconds.
MADE_AT = 1_700_000_000_000


@dataclass(frozen=True)
class File:
    """A regular file of a package."""

    path: str
    data: bytes
    mode: int = 0o644
    #: What in it stands for the prefix, if anything does.
    placeholder: str | None = None
    #: Whether the placeholder is replaced as in a binary: NUL padded, at the same length.
    binary: bool = False

    @property
    def listing(self) -> dict[str, Any]:
        """Its entry in `paths.json`."""
        entry: dict[str, Any] = {
            "_path": self.path,
            "path_type": "hardlink",
            "sha256": hashlib.sha256(self.data).hexdigest(),
            "size_in_bytes": len(self.data),
        }
        if self.placeholder:
            entry["prefix_placeholder"] = self.placeholder
            entry["file_mode"] = "binary" if self.binary else "text"
        return entry


@dataclass(frozen=True)
class Link:
    """A symbolic link of a package."""

    path: str
    target: str
    #: What its entry in `paths.json` claims differently; `None` leaves a key out.
    claims: dict[str, Any] = field(default_factory=dict)

    @property
    def listing(self) -> dict[str, Any]:
        """Its entry in `paths.json`."""
        digest = hashlib.sha256(b"").hexdigest()
        entry = {"_path": self.path, "path_type": "softlink", "sha256": digest, "size_in_bytes": 0}
        return {key: value for key, value in {**entry, **self.claims}.items() if value is not None}


def text(path: str, content: str, mode: int = 0o644) -> File:
    """A text file; where it names the placeholder, that is replaced by the prefix."""
    placeholder = PLACEHOLDER if PLACEHOLDER in content else None
    return File(path, content.encode(), mode, placeholder)


def script(path: str, content: str) -> File:
    """A text file that can be executed."""
    return text(path, content, 0o755)


@dataclass(frozen=True)
class Package:
    """A package, as it is to be; nothing is checked."""

    name: str
    version: str
    entries: tuple[File | Link, ...] = ()
    depends: tuple[str, ...] = ()
    build: str = "0"
    subdir: str = "linux-64"
    #: `python` or `generic`, for packages of `noarch`.
    noarch: str | None = None
    #: Console scripts of a `noarch: python` package, as `name = module:function`.
    entry_points: tuple[str, ...] = ()
    #: `.conda` or `.tar.bz2`.
    ending: str = ".conda"
    #: Listed in `paths.json` although the archive does not hold them.
    listed_only: tuple[File | Link, ...] = ()
    #: What `repodata.json` claims differently, for example another name.
    claims: dict[str, Any] = field(default_factory=dict)
    #: The name of the file in its subdirectory, if not the usual one.
    stored_as: str | None = None

    @property
    def stem(self) -> str:
        """Name, version and build."""
        return f"{self.name}-{self.version}-{self.build}"

    @property
    def file_name(self) -> str:
        """What its archive is called."""
        return self.stored_as or self.stem + self.ending

    @property
    def index(self) -> dict[str, Any]:
        """Its `index.json`."""
        index: dict[str, Any] = {
            "name": self.name,
            "version": self.version,
            "build": self.build,
            "build_number": 0,
            "depends": list(self.depends),
            "license": "0BSD",
            "subdir": self.subdir,
            "timestamp": MADE_AT,
        }
        if self.noarch:
            index["noarch"] = self.noarch
        elif "-" in self.subdir:
            index["platform"], index["arch"] = self.subdir.split("-")[0], "x86_64"
        return index

    def info(self) -> list[File]:
        """The files that describe it."""
        listed = [*self.entries, *self.listed_only]
        paths = {"paths": [entry.listing for entry in listed], "paths_version": 1}
        files = [
            ("index.json", as_json(self.index)),
            ("paths.json", as_json(paths)),
            ("about.json", as_json({"summary": f"{self.name}, made for tests"})),
            ("files", "".join(f"{entry.path}\n" for entry in listed).encode()),
        ]
        if self.noarch == "python":
            python = {"type": "python", "entry_points": list(self.entry_points)}
            files.append(("link.json", as_json({"noarch": python, "package_metadata_version": 1})))
        prefixed = [entry for entry in listed if isinstance(entry, File) and entry.placeholder]
        if prefixed:
            lines = (
                f"{entry.placeholder} {'binary' if entry.binary else 'text'} {entry.path}\n"
                for entry in prefixed
            )
            files.append(("has_prefix", "".join(lines).encode()))
        return [File(f"info/{name}", data) for name, data in files]

    def archive(self) -> bytes:
        """The package as one file."""
        if self.ending == ".tar.bz2":
            return bz2.compress(tar([*self.info(), *self.entries]))
        compressor = zstandard.ZstdCompressor(level=3)
        output = io.BytesIO()
        with zipfile.ZipFile(output, "w", zipfile.ZIP_STORED) as container:
            parts = [
                ("metadata.json", as_json({"conda_pkg_format_version": 2})),
                (f"pkg-{self.stem}.tar.zst", compressor.compress(tar(self.entries))),
                (f"info-{self.stem}.tar.zst", compressor.compress(tar(self.info()))),
            ]
            for name, data in parts:
                container.writestr(zipfile.ZipInfo(name.replace("/", "%2F"), (1980, 1, 1, 0, 0, 0)), data)
        return output.getvalue()


def as_json(value: Any) -> bytes:
    """A value as the bytes of a JSON file."""
    return json.dumps(value, indent=1, sort_keys=True).encode()


def tar(entries: Iterable[File | Link]) -> bytes:
    """An archive of these entries, in this order and under exactly these names."""
    output = io.BytesIO()
    with tarfile.open(fileobj=output, mode="w", format=tarfile.GNU_FORMAT) as archive:
        for entry in entries:
            member = tarfile.TarInfo(entry.path)
            member.mtime = MADE_AT // 1000
            if isinstance(entry, Link):
                member.type, member.linkname, member.mode = tarfile.SYMTYPE, entry.target, 0o777
                archive.addfile(member)
            else:
                member.size, member.mode = len(entry.data), entry.mode
                archive.addfile(member, io.BytesIO(entry.data))
    return output.getvalue()


def write_channel(directory: Path, packages: Iterable[Package], subdirs: Iterable[str]) -> None:
    """Writes a channel: the archives, and a `repodata.json` in each of `subdirs` and wherever a package is."""
    records: dict[str, dict[str, dict[str, Any]]] = defaultdict(dict)
    for package in packages:
        data = package.archive()
        place = directory / package.subdir
        place.mkdir(parents=True, exist_ok=True)
        # A name that leads elsewhere is only claimed: nobody can ask a server for it anyway.
        if Path(package.file_name).name == package.file_name:
            (place / package.file_name).write_bytes(data)
        record = {
            **package.index,
            "md5": hashlib.md5(data, usedforsecurity=False).hexdigest(),
            "sha256": hashlib.sha256(data).hexdigest(),
            "size": len(data),
            **package.claims,
        }
        records[package.subdir][package.file_name] = record
    for subdir in {*subdirs, *records}:
        write_repodata(directory / subdir, subdir, records.get(subdir, {}))


def write_repodata(place: Path, subdir: str, records: dict[str, dict[str, Any]]) -> None:
    """Writes the list of what one subdirectory of a channel offers."""
    place.mkdir(parents=True, exist_ok=True)

    def ending(wanted: str) -> dict[str, dict[str, Any]]:
        return {name: record for name, record in sorted(records.items()) if name.endswith(wanted)}

    repodata = {
        "info": {"subdir": subdir},
        "packages": ending(".tar.bz2"),
        "packages.conda": ending(".conda"),
        "removed": [],
        "repodata_version": 1,
    }
    (place / "repodata.json").write_bytes(as_json(repodata))
