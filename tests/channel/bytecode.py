"""Compiled Python files, which packages for one version of Python bring along.

Owns the form of a `.pyc` file. Sources that are not compiled here are compiled by whoever uses them: those that do not
compile, those that change when they are installed, and tests, which nobody imports.
"""

from __future__ import annotations

import importlib.util
import marshal
import struct
import sys
import warnings
from collections.abc import Iterable

from conda_format import MADE_AT, File, Link


def with_bytecode(entries: Iterable[File | Link], minor: str) -> list[File | Link]:
    """The entries, and what Python makes of the sources among them, if this is that Python."""
    entries = list(entries)
    if minor != f"{sys.version_info[0]}.{sys.version_info[1]}":
        return entries
    sources = [entry for entry in entries if isinstance(entry, File) and is_compiled(entry)]
    return entries + [compiled for source in sources if (compiled := bytecode(source)) is not None]


def is_compiled(source: File) -> bool:
    """Whether a build of a package compiles it."""
    return source.path.endswith(".py") and not source.placeholder and "/tests/" not in source.path


def bytecode(source: File) -> File | None:
    """The compiled file beside a source; it counts as long as the source has its time and its size."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            code = compile(source.data, source.path, "exec", dont_inherit=True)
    except (SyntaxError, ValueError):
        return None
    head = importlib.util.MAGIC_NUMBER + struct.pack("<III", 0, MADE_AT // 1000, len(source.data))
    return File(importlib.util.cache_from_source(source.path), head + marshal.dumps(code))
