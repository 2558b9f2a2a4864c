"""Tier T0: packages of a few bytes, one for each thing that a package can do, or must not be able to do.

Owns what these packages are called and hold; the tests rely on the names. There are several channels, because
some of what they hold makes a whole channel unusable or is about having more than one.
"""

from __future__ import annotations

import json
import random

from conda_format import PLACEHOLDER, File, Link, Package, script, text

#: The version of the newer one of the two false Pythons.
FAKE_PYTHON = "3.11.0"

#: Stands in for Python: it notes how it was called, and does nothing.
FAKE_SCRIPT = """#!/bin/sh
# Stands in for Python {version}: every call is noted in $FAKE_PYTHON_LOG, or beside the environment's conda-meta.
log=${{FAKE_PYTHON_LOG:-{prefix}/conda-meta/python-calls}}
printf '%s\\n' "$*" >> "$log" 2>/dev/null
case ${{1:-}} in
    -V | --version) echo 'Python {version}' ;;
    -c | -m | -I | -*) ;;
    '') cat >/dev/null ;;
    *) echo "fake python {version}: $*" ;;
esac
"""


def fake_python(version: str) -> Package:
    """A Python that is a shell script."""
    minor = ".".join(version.split(".")[:2])
    return Package(
        "python",
        version,
        (
            script(f"bin/python{minor}", FAKE_SCRIPT.format(version=version, prefix=PLACEHOLDER)),
            Link("bin/python3", f"python{minor}"),
            Link("bin/python", f"python{minor}"),
            text(f"lib/python{minor}/site-packages/README.txt", "packages come here\n"),
        ),
        build="fake_0",
    )


def placeholders() -> list[Package]:
    """Packages that name their prefix."""
    short = "/short/placeholder/"
    return [
        Package(
            "text-prefix",
            "1.0",
            (
                text("etc/text-prefix.conf", f"prefix = {PLACEHOLDER}\nlib = {PLACEHOLDER}/lib\n"),
                script("bin/text-prefix", f"#!{PLACEHOLDER}/bin/python\nprint('hello')\n"),
            ),
        ),
        Package(
            "binary-prefix",
            "1.0",
            (
                File(
                    "lib/binary-prefix.bin",
                    b"\x7fBIN\x00" + PLACEHOLDER.encode() + b"/share/data\x00after\x00",
                    placeholder=PLACEHOLDER,
                    binary=True,
                ),
            ),
        ),
        Package(
            "short-placeholder",
            "1.0",
            (
                File(
                    "lib/short-placeholder.bin",
                    b"\x7fBIN\x00" + short.encode() + b"\x00after\x00",
                    placeholder=short,
                    binary=True,
                ),
            ),
        ),
    ]


def activation() -> Package:
    """A package that sets variables, by a script and by a list."""
    hook = (
        'export ACTIVATED_BY="script of $CONDA_PREFIX"\nexport PATH="$CONDA_PREFIX/opt/activated/bin:$PATH"\n'
    )
    return Package(
        "activated",
        "1.0",
        (
            text("etc/conda/activate.d/activated.sh", hook),
            text("etc/conda/env_vars.d/activated.json", json.dumps({"ACTIVATED_VAR": "from a list"})),
            script("opt/activated/bin/activated-tool", "#!/bin/sh\necho activated\n"),
        ),
    )


def demands() -> list[Package]:
    """Packages that demand something of the machine, of each other, or of another machine."""
    return [
        Package("needs-cuda", "1.0", (text("share/needs-cuda", "1\n"),), ("__cuda >=12",)),
        Package("needs-glibc", "1.0", (text("share/needs-glibc", "1\n"),), ("__glibc >=9",)),
        Package("shared-base", "1.0", (text("share/shared-base", "1\n"),)),
        Package("shared-base", "2.0", (text("share/shared-base", "2\n"),)),
        Package("left", "1.0", (text("share/left", "1\n"),), ("shared-base 1.*",)),
        Package("right", "1.0", (text("share/right", "1\n"),), ("shared-base 2.*",)),
        Package("only-osx", "1.0", (text("share/only-osx", "1\n"),), subdir="osx-arm64"),
        Package("layered", "1.0", (text("share/layered", "main\n"),)),
    ]


def formats() -> list[Package]:
    """Packages in the other shapes that there are."""
    module = "def main():\n    print('noarch tool')\n"
    return [
        Package("old-format", "1.0", (text("share/old-format", PLACEHOLDER + "\n"),), ending=".tar.bz2"),
        Package(
            "noarch-tool",
            "1.0",
            (text("site-packages/noarch_tool.py", module),),
            ("python >=3.8",),
            build="pyh_0",
            subdir="noarch",
            noarch="python",
            entry_points=("noarch-tool = noarch_tool:main",),
        ),
        Package(
            "noarch-generic",
            "1.0",
            (text("share/noarch-generic", "1\n"),),
            subdir="noarch",
            noarch="generic",
        ),
        Package(
            "linked",
            "1.0",
            (
                text("share/linked/target", "1\n"),
                Link("share/linked/link", "target"),
                Link("linked", "share"),
            ),
        ),
        Package("writable", "1.0", (text("share/writable.txt", "as it was made\n"),)),
    ]


def clashing() -> list[Package]:
    """Two packages with one file."""
    return [
        Package(name, "1.0", (text("share/clash.txt", f"{name}\n"), text(f"share/{name}", "1\n")))
        for name in ("clash-a", "clash-b")
    ]


def hostile() -> list[Package]:
    """Packages that try to leave their prefix, or to run what nobody called."""
    post_link = (
        '#!/bin/sh\necho ran > "$PREFIX/post-link-ran"\necho ran > /tmp/agent-env-post-link-ran\n'
        "sleep 600 &\nsleep 600\n"
    )
    escaped = b"escaped\n"
    return [
        Package("post-link", "1.0", (script("bin/.post-link-post-link.sh", post_link),)),
        Package("traversal", "1.0", (File("../../../agent-env-escaped", escaped),)),
        Package("absolute-path", "1.0", (File("/tmp/agent-env-escaped", escaped),)),
        Package(
            "listed-traversal",
            "1.0",
            (text("share/honest", "1\n"),),
            listed_only=(File("../../../agent-env-escaped", escaped),),
        ),
        Package("absolute-symlink", "1.0", (Link("share/absolute-symlink", "/etc/passwd"),)),
        Package("escaping-symlink", "1.0", (Link("share/escaping-symlink", "../../../../../etc/passwd"),)),
        Package(
            "through-symlink",
            "1.0",
            (Link("share/through", "/tmp"), File("share/through/agent-env-escaped", escaped)),
        ),
        Package(
            "evil-entry-point",
            "1.0",
            (text("site-packages/evil_entry_point.py", "def main(): pass\n"),),
            ("python >=3.8",),
            subdir="noarch",
            noarch="python",
            entry_points=("../../agent-env-escaped = evil_entry_point:main",),
        ),
        Package("bomb", "1.0", (File("share/bomb", bytes(96 << 20)),)),
    ]


def leading_out(target: str) -> str:
    """A link's text that seems to stay beside `d/l1`, a link to its own directory, and leads to `/target`."""
    return "l1/" * 14 + "../" * 14 + target


#: Tells who runs an activation script, and tries to change the environment.
WITNESS = """id -u >/var/tmp/agent-env-witnessing/uid
cat /proc/self/status >/var/tmp/agent-env-witnessing/status
touch "$CONDA_PREFIX/planted" 2>/dev/null
export WITNESSED=yes
"""


def over_links() -> list[Package]:
    """Packages whose links lead out of their prefix over other links: to a secret, and to a folder of programs."""
    step = Link("d/l1", ".")
    secret = leading_out("tmp/agent-env-victim/secret")
    read_through = {
        "path_type": "hardlink",
        "prefix_placeholder": "/opt/never",
        "file_mode": "text",
        "size_in_bytes": None,
    }
    return [
        Package("python", "3.9.0", (text("share/empty-python", "1\n"),), build="empty_0"),
        Package(
            "python",
            "3.8.0",
            (text("share/astray-python", "1\n"),),
            ("innocent",),
            build="astray_0",
            claims={"python_site_packages_path": "../../../../../../tmp/agent-env-victim/bin"},
        ),
        Package("innocent", "1.0", (text("share/innocent", "1\n"), Link("d/l1", "."), Link("d/up", "l1/../d"))),
        Package("leak", "1.0", (step, Link("d/l2", secret, read_through))),
        Package("leak-old", "1.0", (step, Link("d/l2", secret, read_through)), ending=".tar.bz2"),
        Package("leak-copied", "1.0", (step, Link("d/l2", secret, {"path_type": "hardlink"}))),
        Package("pointing", "1.0", (step, Link("d/l2", secret))),
        Package("unlisted", "1.0", (step, Link("d/l2", secret, {"_path": "share/other"}))),
        Package("layered", "1.0", (text("share/layered", "another of the same name\n"),)),
        Package("half-a", "1.0", (step,)),
        Package("half-b", "1.0", (Link("d/l2", secret),), ("half-a",)),
        Package(
            "dotted-record",
            "1.0",
            (step, Link("conda-meta/dotted.json", f"../d/{secret}", {"_path": "./conda-meta/dotted.json"})),
        ),
        Package(
            "doubled-record",
            "1.0",
            (step, Link("conda-meta/doubled.json", f"../d/{secret}", {"_path": "conda-meta//doubled.json"})),
        ),
        Package(
            "linked-meta",
            "1.0",
            (step, Link("d/m", "../conda-meta"), Link("d/m/x.json", secret, {"_path": "d/m/x.json"})),
        ),
        Package("linked-bin", "1.0", (step, Link("bin", f"d/{leading_out('tmp/agent-env-victim/bin')}"))),
        Package("inner-bin", "1.0", (text("share/tools/tool", "1\n"), Link("bin", "share/tools"))),
        Package(
            "planting",
            "1.0",
            (text("site-packages/planting.py", "def main(): pass\n"),),
            ("python",),
            subdir="noarch",
            noarch="python",
            entry_points=("planted = planting:main",),
        ),
        Package("witnessing", "1.0", (text("etc/conda/activate.d/witness.sh", WITNESS),)),
        Package("filled-bin", "1.0", (script("bin/planted", "#!/bin/sh\n"),)),
        Package(
            "odd-modes",
            "1.0",
            (
                File("share/odd-modes/open", b"1\n", mode=0o666),
                File("share/odd-modes/closed", b"1\n", mode=0o600),
                File("share/odd-modes/program", b"#!/bin/sh\n", mode=0o4711),
            ),
        ),
    ]


def many() -> list[Package]:
    """What takes a moment: a package of many files, one of some megabytes, and a set of small packages."""
    noise = random.Random(7)
    files = tuple(text(f"share/many/{n % 40}/{n}.txt", f"file {n}\n") for n in range(2000))
    parts = [
        Package(
            f"part-{n:02}",
            "1.0",
            tuple(text(f"share/part-{n:02}/{i}.txt", f"{n} {i} {PLACEHOLDER}\n") for i in range(25)),
        )
        for n in range(30)
    ]
    whole = Package("parts", "1.0", depends=tuple(part.name for part in parts))
    return [
        Package("many-files", "1.0", files),
        Package("big", "1.0", (File("share/big.bin", noise.randbytes(4 << 20)),)),
        *parts,
        whole,
    ]


def second() -> list[Package]:
    """The packages of another channel, some of which have the names of those of the first."""
    return [
        Package("layered", "2.0", (text("share/layered", "second\n"),)),
        Package("only-second", "1.0", (text("share/only-second", "1\n"),)),
    ]


def odd() -> list[Package]:
    """Packages whose names lead elsewhere."""
    honest = Package("honest", "1.0", (text("share/honest", "1\n"),))
    strange = [
        Package("con/../../strange", "1.0", (text("share/strange", "1\n"),), stored_as="strange-1.0-0.conda"),
        Package(
            "misnamed",
            "1.0",
            (text("share/misnamed", "1\n"),),
            stored_as="../../agent-env-escaped-1.0-0.conda",
        ),
    ]
    return [honest, *strange]


def channels() -> dict[str, tuple[list[Package], tuple[str, ...]]]:
    """Every channel of the tier: its packages and the subdirectories it has in any case."""
    usual = ("linux-64", "noarch")
    main = [
        fake_python(FAKE_PYTHON),
        fake_python("3.10.0"),
        *placeholders(),
        activation(),
        *demands(),
        *formats(),
        *clashing(),
        *hostile(),
        *many(),
    ]
    return {
        "main": (main, usual),
        "second": (second(), usual),
        "odd": (odd(), usual),
        "links": (over_links(), usual),
        "incomplete": ([Package("lonely", "1.0", (text("share/lonely", "1\n"),))], ("linux-64",)),
        "empty": ([], usual),
    }
