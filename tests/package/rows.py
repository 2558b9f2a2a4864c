"""What a package is tried for, in userlands of its own; started by `tests/run package`.

    rows.py PACKAGES [ROW...]

PACKAGES is a directory with what packaging/build-deb made, and in older/ and newer/ the same under other versions. Each
row gets a fresh root directory, made of Debian's packages, in which no systemd runs. What needs one that runs is a row
of tests/bed. The last line is `test result:` with how many rows held.
"""

import functools
import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import traceback
import urllib.request
from pathlib import Path

HERE = Path(__file__).resolve().parents[2]
PACKAGES = Path(sys.argv[1]).resolve()
KEPT = PACKAGES.parent / "package-userlands"
WITH = "init-system-helpers,systemd,python3,passwd"
# The oldest that must do, by release and mirror.
OLD = {
    "bullseye": "http://deb.debian.org/debian",
    "focal": "http://archive.ubuntu.com/ubuntu",
}
# Debian does not have the keys of Ubuntu: this package of them, and no other.
UBUNTU_KEYS = "http://archive.ubuntu.com/ubuntu/pool/main/u/ubuntu-keyring/ubuntu-keyring_2021.03.26_all.deb"
UBUNTU_KEYS_SHA256 = "0d0e7ed6b112f5d03eabf3c7eb01ebdacf9c57714b279e90495cfc58c8c4520f"
SOON = 300  # seconds, for a command that waits for nobody


def ran(*command, ok=True, **more):
    done = subprocess.run(command, capture_output=True, text=True, timeout=SOON, **more)
    if ok and done.returncode != 0:
        raise AssertionError(f"{' '.join(map(str, command))}: {done.returncode}\n{done.stdout}{done.stderr}")
    return done


def due(what, found, wanted):
    if found != wanted:
        raise AssertionError(f"{what}: {found!r} where {wanted!r} was due")


def holds(what, good):
    if not good:
        raise AssertionError(what)


def deb(name, version=""):
    (found,) = (PACKAGES / version).glob(f"{name}_*_amd64.deb")
    return found


def ubuntu_keys():
    keys = KEPT / "usr/share/keyrings/ubuntu-archive-keyring.gpg"
    if not keys.exists():
        package = urllib.request.urlopen(UBUNTU_KEYS, timeout=60).read()
        due("the digest of the keys of Ubuntu", hashlib.sha256(package).hexdigest(), UBUNTU_KEYS_SHA256)
        with tempfile.NamedTemporaryFile(suffix=".deb") as file:
            file.write(package)
            file.flush()
            ran("dpkg-deb", "--extract", file.name, KEPT)
    return keys


@functools.cache
def archive(release):
    """The userland of a release as an archive, made once."""
    KEPT.mkdir(exist_ok=True)
    made = KEPT / f"{release}.tar"
    if not made.exists():
        print(f"  making the userland of {release}", flush=True)
        more = [f"--keyring={ubuntu_keys()}"] if release == "focal" else []
        draft = made.with_suffix(".new.tar")
        subprocess.run(
            ["mmdebstrap", "--quiet", "--variant=minbase", f"--include={WITH}", *more, release, draft, OLD[release]],
            check=True,
            timeout=1200,
        )
        draft.rename(made)
    return made


class Userland:
    """A root directory of a release, with its own processes and mounts while a command runs in it."""

    def __init__(self, release="bullseye"):
        self.root = Path(tempfile.mkdtemp(prefix="package-", dir=KEPT.parent))
        ran("tar", "-xf", archive(release), "-C", self.root)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        shutil.rmtree(self.root, ignore_errors=True)

    def run(self, command, user="root", ok=True):
        """Runs a shell command, with /proc, and with what it started ended at its end."""
        inside = f"mount -t proc proc /proc && mount -t tmpfs run /run && exec su -s /bin/sh {user} -c \"$0\""
        way = ["unshare", "--mount", "--pid", "--fork", "--kill-child", "chroot", self.root, "/bin/sh", "-c", inside]
        clean = {"PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", "HOME": "/root", "LANG": "C.UTF-8"}
        done = ran(*way, command, ok=ok, env=clean)
        return done.stdout + done.stderr

    def bring(self, *files):
        (self.root / "packages").mkdir(exist_ok=True)
        for file in files:
            shutil.copy(file, self.root / "packages")

    def install(self, *files):
        self.bring(*files)
        names = " ".join(f"/packages/{file.name}" for file in files)
        return self.run(f"DEBIAN_FRONTEND=noninteractive dpkg --force-confold -i {names}")

    def files(self, *below):
        """Every path there is, with its kind, owner, mode and text or target."""
        found = {}
        for top in below:
            for directory, folders, names in os.walk(self.root / top):
                for name in folders + names:
                    path = Path(directory) / name
                    held = path.lstat()
                    text = os.readlink(path) if path.is_symlink() else path.read_bytes() if path.is_file() else b""
                    found[str(path.relative_to(self.root))] = (held.st_mode, held.st_uid, text)
        return found

    def exists(self, path):
        return os.path.lexists(self.root / path)


# A job of a user with a daemon of his own, from nothing to its output.
JOB = """cd /tmp && mkdir -p project && printf 'command: echo it ran; echo kept > outputs/kept\\n' > project/job.yml &&
printf 'environment: host\\n' >> project/job.yml &&
agentctl run project && agentctl download - -o results && grep -r kept results && agentctl stop"""


def runs_a_job(land, first):
    said = land.run(f"{first}; {JOB}", "ada")
    holds(f"the job says that it ran:\n{said}", "it ran" in said and "kept" in said)


def row_lintian():
    # What is a matter of taste, or of an upload to Debian, is no error.
    files = [deb("agentd"), deb("agentctl")]
    done = ran("lintian", "--allow-root", "--fail-on", "error", "--tag-display-limit", "0", *files, ok=False)
    print("  " + "\n  ".join(done.stdout.splitlines()))
    due("lintian's verdict", done.returncode, 0)


def listed(package):
    lines = ran("dpkg-deb", "--contents", package).stdout.splitlines()
    return {re.split(r" +", line, maxsplit=5)[5].split(" -> ")[0].removeprefix("./"): line for line in lines}


def row_contents():
    daemon, client = listed(deb("agentd")), listed(deb("agentctl"))
    units = [path.name for path in (HERE / "systemd").iterdir() if path.suffix in (".service", ".socket", ".slice")]
    wanted = [f"lib/systemd/system/{unit}" for unit in units]
    wanted += [f"usr/lib/agentd/{name}" for name in ("agentd", "agent-shim", "agent-spawn", "agent-env")]
    wanted += [f"usr/lib/agentd/providers/{path.name}" for path in (HERE / "packaging/providers").iterdir()]
    wanted += ["usr/bin/agentd", "etc/agentd/agentd.yaml", "usr/lib/sysusers.d/agentd.conf", "usr/lib/agentd/agentd-root.conf"]
    wanted += ["usr/share/man/man1/agentd.1.gz", "usr/share/man/man1/agentd-join.1.gz"]
    due("missing of agentd", [path for path in wanted if path not in daemon], [])
    wanted = ["usr/bin/agentctl", "usr/share/man/man1/agentctl-run.1.gz", "usr/share/bash-completion/completions/agentctl"]
    wanted += ["usr/share/zsh/vendor-completions/_agentctl", "usr/share/fish/vendor_completions.d/agentctl.fish"]
    due("missing of agentctl", [path for path in wanted if path not in client], [])
    for name, held in (("agentd", daemon), ("agentctl", client)):
        for document in ("copyright", "changelog.gz", "third-party-licences.gz"):
            holds(f"{name} has {document}", f"usr/share/doc/{name}/{document}" in held)
        due(f"of others than root in {name}", [line for line in held.values() if " root/root " not in line], [])
    with tempfile.TemporaryDirectory() as root:
        for name in ("agentd", "agentctl"):
            ran("dpkg-deb", "--extract", deb(name), root)
        script = Path(root, "usr/share/bash-completion/completions/agentctl")
        ran("bash", "-n", script)
        licences = ran("zcat", f"{root}/usr/share/doc/agentd/third-party-licences.gz").stdout
        for crate in ("tokio ", "rattler ", "ring "):
            holds(f"the licences name {crate}", f"\n{crate}" in licences)
        for page in Path(root, "usr/share/man/man1").iterdir():
            text = ran("zcat", page).stdout
            holds(f"{page.name} is a manual page", "\n.TH " in text and "\n.SH NAME" in text)


def row_old(release="bullseye"):
    with Userland(release) as land:
        print("  " + land.run("cat /etc/os-release; ldd --version").splitlines()[0])
        print("  " + land.install(deb("agentd"), deb("agentctl")).splitlines()[-1])
        for program in ("/usr/bin/agentd", "/usr/bin/agentctl"):
            print("  " + land.run(f"{program} --version").strip())
        # It speaks to programs, and says so; the loader would say something else. The supervisor is in the job below.
        said = land.run("/usr/lib/agentd/agent-env </dev/null", ok=False)
        holds(f"agent-env runs: {said}", said and "GLIBC" not in said and "not found" not in said)
        land.run("useradd -m ada")
        # The machine's service would be said to be there, and stopped: a user's own is asked for.
        land.run("dpkg -r agentd && rm -rf /var/lib/agentd")
        land.run(f"dpkg-deb -x /packages/{deb('agentd').name} /opt/agentd")
        runs_a_job(land, "export PATH=$PATH:/opt/agentd/usr/lib/agentd")


def row_install():
    with Userland() as land:
        before = land.files("home", "root")
        said = land.install(deb("agentd"), deb("agentctl"))
        holds(f"it says how somebody may submit jobs: {said}", "usermod -aG agentd" in said)
        for link in ("multi-user.target.wants/agentd.service",):
            holds(f"{link} is enabled", land.exists(f"etc/systemd/system/{link}"))
        known = land.run("getent passwd agentd; getent group agentd agentd-admin")
        due("users and groups", len(known.splitlines()), 3)
        due("mode of the state", (land.root / "var/lib/agentd").stat().st_mode & 0o7777, 0o711)
        due("whose the state is", land.run("stat -c %U /var/lib/agentd"), "agentd\n")
        holds("the daemon is not root", not land.exists(AS_ROOT))
        due("check of the configuration", land.run("agentd check-config"), "the configuration is valid\n")
        holds("the group is the one of the package", "socket_group" in land.run("agentd show-config | grep 'socket_group.*agentd'"))
        due("homes", land.files("home", "root"), before)


AS_ROOT = "etc/systemd/system/agentd.service.d/root.conf"


def row_upgrade():
    with Userland() as land:
        land.install(deb("agentd", "older"), deb("agentctl", "older"))
        config = land.root / "etc/agentd/agentd.yaml"
        config.write_text("slots: 7\n")
        land.run("systemctl disable agentd")
        (land.root / "var/lib/agentd/kept").write_text("state")
        for version in ("", "newer", "older"):  # up, up, and down
            land.install(deb("agentd", version), deb("agentctl", version))
            due("the configuration", config.read_text(), "slots: 7\n")
            due("the state", (land.root / "var/lib/agentd/kept").read_text(), "state")
            enabled = land.exists("etc/systemd/system/multi-user.target.wants/agentd.service")
            due("whether the service is enabled, which the operator disabled", enabled, False)
            packed = ran("dpkg-deb", "--field", deb("agentd", version), "Version").stdout
            due("the version", land.run("dpkg-query -W -f '${Version}\\n' agentd"), packed)
            holds("the daemon is not root", not land.exists(AS_ROOT))
        land.run("chown -R root: /var/lib/agentd")
        said = land.install(deb("agentd"))
        holds(f"the daemon of a state that is root's stays root, and it is told: {said}", land.exists(AS_ROOT) and "root" in said)
        due("whose the state is", land.run("stat -c %u /var/lib/agentd"), "0\n")
        land.run("dpkg -P agentctl agentd")
        holds("purge removes that too", not land.exists(AS_ROOT))


def row_remove():
    with Userland() as land:
        land.run("useradd -m ada")
        own = land.root / "home/ada/.local/share/agentd"
        own.mkdir(parents=True)
        (own / "job").write_text("hers")
        everything = ("bin", "etc", "home", "lib", "opt", "root", "sbin", "srv", "usr")
        before = land.files(*everything)
        land.install(deb("agentd"), deb("agentctl"))
        (land.root / "etc/agentd/agentd.yaml").write_text("slots: 7\n")
        state = land.root / "var/lib/agentd/controller"
        state.mkdir()
        (state / "database").write_text("jobs")
        land.run("dpkg -r agentd agentctl")
        due("state after remove", (state / "database").read_text(), "jobs")
        due("configuration after remove", (land.root / "etc/agentd/agentd.yaml").read_text(), "slots: 7\n")
        holds("programs are gone", not land.exists("usr/bin/agentd") and not land.exists("usr/lib/agentd"))
        land.install(deb("agentd"))
        due("configuration after another install", (land.root / "etc/agentd/agentd.yaml").read_text(), "slots: 7\n")
        said = land.run("dpkg -P agentd agentctl")
        for word in ("removing /var/lib/agentd", "controller", "/etc/agentd"):
            holds(f"purge says `{word}`: {said}", word in said)
        holds("state and configuration are gone", not land.exists("var/lib/agentd") and not land.exists("etc/agentd"))
        due("what she had", (own / "job").read_text(), "hers")
        after = land.files(*everything)
        # The system user stays, and so do the backups that its making left.
        accounts = re.compile(r"etc/(passwd|group|shadow|gshadow|subuid|subgid)-?$|etc/\.pwd\.lock$")
        left = [path for path in set(before) ^ set(after) if not accounts.match(path)]
        left += [path for path in set(before) & set(after) if before[path] != after[path] and not accounts.match(path)]
        due("what an installation leaves", sorted(left), [])


def row_archive():
    """install.sh: a user without root and without a service manager."""
    (archived,) = PACKAGES.glob("agentd-*-linux-amd64.tar.gz")
    with Userland() as land:
        land.run("useradd -m ada")
        ran("tar", "-xzf", archived, "-C", land.root / "opt")
        tool = f"/opt/{archived.name.removesuffix('.tar.gz')}/install.sh"
        before = land.files("home", "opt", "usr", "etc")
        land.run(f"! {tool}")  # root is told to take the package
        for _ in range(2):  # again is an upgrade
            said = land.run(tool, "ada")
            holds(f"it says what it did: {said}", "installed agentctl" in said and "no service" in said)
        runs_a_job(land, "export PATH=/home/ada/.local/bin:$PATH")
        said = land.run(f"{tool} --uninstall", "ada")
        holds(f"jobs stay: {said}", land.exists("home/ada/.local/share/agentd/controller"))
        land.run(tool, "ada")
        said = land.run(f"{tool} --uninstall --purge", "ada")
        holds(f"it says what goes: {said}", "removing /home/ada/.local/share/agentd" in said)
        after = land.files("home", "opt", "usr", "etc")
        left = sorted(path for path in set(before) ^ set(after))
        # Where the user's data is, others keep theirs.
        due("what it leaves", [path for path in left if path not in SHARED], [])


SHARED = {"home/ada/.local", "home/ada/.local/share", "home/ada/.cache", "home/ada/.config"}


def row_cloud_init():
    """User data by the program itself, judged by cloud-init's own schema."""
    with tempfile.TemporaryDirectory() as home:
        for name in ("agentd", "agentctl"):
            ran("dpkg-deb", "--extract", deb(name), home)
        tools = f"{home}/usr/bin:{home}/usr/lib/agentd"
        clean = {"PATH": f"{tools}:{os.environ['PATH']}", "HOME": home, "XDG_DATA_HOME": f"{home}/data"}
        state = Path(home, "data/agentd")
        state.mkdir(parents=True)
        config = Path(home, "agentd.yaml")
        config.write_text("listen: 127.0.0.1:0\n")
        log = Path(home, "log").open("w")
        daemon = subprocess.Popen([f"{home}/usr/lib/agentd/agentd", "run", "--user", "--config", config], env=clean, stderr=log)
        try:
            end = time.monotonic() + 60
            while not (state / "agentd.sock").exists():
                holds("the daemon begins to listen within 60 s", time.monotonic() < end and daemon.poll() is None)
                time.sleep(0.1)
            for package in ([], ["https://packages.lab/agentd.deb"]):
                made = ran("agentctl", "token", "create", "--cloud-init", *package, env=clean)
                user_data = Path(home, "user-data")
                user_data.write_text(made.stdout)
                said = ran("cloud-init", "schema", "--config-file", user_data)
                holds(f"cloud-init takes it: {said.stdout}", "Valid" in said.stdout)
                script = made.stdout.split("content: |\n")[1].split("runcmd:")[0]
                ran("sh", "-n", "/dev/stdin", input="".join(line[6:] + "\n" for line in script.splitlines()))
        finally:
            daemon.terminate()
            daemon.wait(60)


ROWS = {
    "L1": ("lintian finds no error", row_lintian),
    "L2": ("the packages hold what they should, of root", row_contents),
    "O1": ("Debian 11 runs the programs and a job", row_old),
    "O2": ("Ubuntu 20.04 runs the programs and a job", lambda: row_old("focal")),
    "I1": ("an installation without systemd enables the service", row_install),
    "I2": ("upgrade and downgrade keep configuration, state, and what is disabled", row_upgrade),
    "I3": ("remove keeps what anybody made, purge says what goes", row_remove),
    "A1": ("install.sh and its --uninstall leave nothing", row_archive),
    "C1": ("cloud-init's schema takes the user data", row_cloud_init),
}


def main():
    passed, failed = 0, 0
    for name in sys.argv[2:] or ROWS:
        what, row = ROWS[name]
        began = time.monotonic()
        try:
            row()
            passed += 1
            verdict = "ok"
        except Exception as error:  # whatever broke, the row did not hold, and the others are tried all the same
            failed += 1
            verdict = "FAILED"
            print(f"{name} FAILED {type(error).__name__}: {error}")
            if not isinstance(error, AssertionError):
                traceback.print_exc()
        print(f"{name:<4} {what:<70} {verdict:<6} {time.monotonic() - began:>4.0f} s", flush=True)
    print(f"test result: {'FAILED' if failed else 'ok'}. {passed} passed; {failed} failed")
    sys.exit(failed > 0)


if __name__ == "__main__":
    main()
