# What attach and detach do on a host. Sent over SSH and read by `sh` from its standard input, with these variables
# before it:
#   VERB        which of the functions below to do, one after the other
#   MODE        system: for the machine, as root; user: for the one who logged in
#   ID          which attach this is
#   SESSION     the process of its connection, and when that began: its lock holds no longer
#   STAGE       where what is sent is kept until it is all there
#   HASH        of the package, which is also the name of its directory
#   NAME, CONTROLLER, TOKEN, SERVICE, SEEN (by the controller), ...
#   LISTENS, KEY the port of the loopback that a tunnel makes the controller's, or nothing; and who may open it
#   ADDRESS      the controller as the daemon reaches it
# An answer is a line `agentd-attach KEY VALUE`; whatever a shell's own files print is none.
#
# Invariant: what attach makes on the host is written into MANIFEST before it is made, and only if it was not there.

set -u
LC_ALL=C
export LC_ALL
PATH=$PATH:/usr/local/sbin:/usr/sbin:/sbin
umask 022

say() { printf 'agentd-attach %s\n' "$*"; }

fail() {
    say "failed $*"
    exit 3
}

places() {
    case $MODE in
        system)
            PREFIX=/usr/local STATE=/var/lib/agentd UNITS=/etc/systemd/system
            MANIFEST=/var/lib/agentd-attach LOCK=/run/agentd-attach.lock
            ;;
        user)
            PREFIX=$HOME/.local STATE=$HOME/.local/share/agentd UNITS=$HOME/.config/systemd/user
            MANIFEST=$HOME/.agentd-attach LOCK=$STAGE/lock
            XDG_RUNTIME_DIR=${XDG_RUNTIME_DIR:-/run/user/$(id -u)}
            export XDG_RUNTIME_DIR
            ;;
    esac
    LIBRARY=$PREFIX/lib/agentd
}

# begun PID: when a process began, as the kernel counts; nothing if there is none.
begun() { sed -n 's/.*) //p' "/proc/$1/stat" 2>/dev/null | cut -d' ' -f20; }

free_kb() {
    at=$1
    while [ ! -d "$at" ]; do at=$(dirname "$at"); done
    df -Pk "$at" 2>/dev/null | awk 'NR == 2 { print $4 }'
}

may_write() {
    at=$1
    while [ ! -d "$at" ]; do at=$(dirname "$at"); done
    # A directory may be writable by its mode and lie on a file system that is not.
    probe=$at/.agentd-attach.$$
    if (: >"$probe") 2>/dev/null; then rm -f "$probe" && echo yes; else echo no; fi
}

# noted MANIFEST KEY: what the last attach wrote there.
noted() { [ -r "$1" ] && sed -n "s/^$2 //p" "$1" | tail -n 1; }

probe() {
    (
        ID='' VERSION_ID='' PRETTY_NAME=''
        [ -r /etc/os-release ] && . /etc/os-release
        say "os_id $ID"
        say "os_version $VERSION_ID"
        say "os_name $PRETTY_NAME"
    )
    say "arch $(uname -m)"
    say "glibc $(getconf GNU_LIBC_VERSION 2>/dev/null | awk '{ print $2 }')"
    say "uid $(id -u)"
    say "home $HOME"
    say "host $(uname -n)"
    if [ "$(id -u)" = 0 ]; then
        say 'sudo root'
    elif ! command -v sudo >/dev/null; then
        say 'sudo none'
    elif sudo -k -n true 2>/dev/null; then
        say 'sudo free'
    else
        say 'sudo password'
    fi
    say "stage_kb $(free_kb "$STAGE")"
    say "stage_writable $(may_write "$(dirname "$STAGE")")"
    say "system_kb $(free_kb /usr/local)"
    say "state_kb $(free_kb /var/lib/agentd)"
    say "home_kb $(free_kb "$HOME")"
    say "home_writable $(may_write "$HOME")"
    say "memory_kb $(awk '/^MemTotal:/ { print $2 }' /proc/meminfo)"
    say "python $(python3 -c 'import sys; print("%d.%d.%d" % sys.version_info[:3])' 2>/dev/null)"
    say "venv $(python3 -c 'import ensurepip, venv; print("yes")' 2>/dev/null)"
    [ -S /var/run/docker.sock ] && say 'docker yes'
    if [ -r /proc/driver/nvidia/version ]; then
        say "gpu $(sed -n 's/.*Kernel Module *\([0-9.]*\).*/\1/p' /proc/driver/nvidia/version)"
    elif ls /sys/bus/pci/devices/*/vendor >/dev/null 2>&1 &&
        grep -lq 0x10de /sys/bus/pci/devices/*/vendor 2>/dev/null; then
        say 'gpu none'
    fi
    [ -d /run/systemd/system ] && say 'systemd yes'
    [ -S "/run/user/$(id -u)/systemd/private" ] && say 'user_systemd yes'
    for tool in tar gzip sha256sum flock setsid tac; do command -v $tool >/dev/null || say "lacks $tool"; done
    [ -n "$CONTROLLER_HOST" ] && reach
    [ -x /usr/bin/agentd ] && say 'packaged yes'
    [ -e /var/lib/agentd ] && say 'system_state yes'
    [ -e "$HOME/.local/share/agentd" ] && say 'user_state yes'
    for mode in system user; do
        manifest=/var/lib/agentd-attach
        [ $mode = user ] && manifest=$HOME/.agentd-attach
        [ -e "$manifest" ] || continue
        say "${mode}_manifest yes"
        say "${mode}_controller $(noted "$manifest" controller)"
        say "${mode}_name $(noted "$manifest" name)"
        say "${mode}_service $(noted "$manifest" service)"
        say "${mode}_tunnel $(noted "$manifest" tunnel)"
    done
    say "session $SHELL_PARENT $(begun "$SHELL_PARENT")"
    if [ "$(id -u)" = 0 ]; then
        MODE=system
        look
        say 'looked yes'
    fi
    # Last, because what comes before may take long: the clock is compared with the moment at which this is read.
    say "now $(date +%s)"
    say 'done'
}

# Whether a connection to the controller can be made from here.
reach() {
    to="$CONTROLLER_HOST $CONTROLLER_PORT"
    # shellcheck disable=SC2016,SC2086
    if command -v bash >/dev/null; then
        why=$(timeout 10 bash -c 'exec 3<>"/dev/tcp/$0/$1"' $to 2>&1) && say 'reach yes' && return
    elif command -v python3 >/dev/null; then
        why=$(python3 -c 'import socket, sys; socket.create_connection((sys.argv[1], int(sys.argv[2])), 10)' $to 2>&1) &&
            say 'reach yes' && return
    else
        return
    fi
    why=$(printf '%s' "$why" | tail -n 1 | sed 's/.*: //')
    say "reach ${why:-no answer within 10 s}"
}

# What only the one who installs may see; and that he may.
look() {
    places
    sed -n 's/.*"controller"[: ]*"\([^"]*\)".*/agentd-attach joined \1/p' "$STATE/identity.json" 2>/dev/null | head -n 1
    say 'done'
}

# Takes the lock, or says who has it. A connection that is gone, or of which nothing was heard for two minutes, has none.
lock() {
    places
    [ $MODE = system ] || stage
    # A directory can be locked, and leaves no file behind.
    exec 9<"$(dirname "$LOCK")"
    flock -w 10 9 || fail "another process holds $(dirname "$LOCK")"
    if read -r id pid began rest 2>/dev/null <"$LOCK" && [ "$id" != "$ID" ] &&
        [ "$(begun "$pid")" = "$began" ] &&
        [ -n "$(find "$LOCK" /var/tmp/agentd-attach-*/*.part -mmin -2 2>/dev/null)" ]; then
        say "held $rest"
    else
        # shellcheck disable=SC2086
        set -- $SESSION
        echo "$ID $1 $2 ${SSH_CLIENT_ADDRESS:-somebody}" >"$LOCK"
        say 'locked yes'
    fi
}

# Every step of an attach begins so: another may have taken its place meanwhile.
owned() {
    places
    read -r id rest 2>/dev/null <"$LOCK" || fail 'the lock of this attach is gone; run it again'
    [ "$id" = "$ID" ] || fail "another attach took its place: ${rest##* }"
    touch "$LOCK"
}

unlock() {
    places
    read -r id rest 2>/dev/null <"$LOCK" && [ "$id" = "$ID" ] && rm -f "$LOCK"
    # Not if part of a package waits there.
    rmdir "$STAGE" 2>/dev/null
    say 'done'
}

# The directory of what is sent: nobody else's, as anybody may make one of its name.
stage() {
    mkdir -m 700 "$STAGE" 2>/dev/null
    [ -d "$STAGE" ] && [ ! -h "$STAGE" ] && [ -O "$STAGE" ] || fail "$STAGE cannot be used: it is somebody else's, or there is no room"
    chmod 700 "$STAGE"
}

# What there is of the package.
part() {
    stage
    for old in "$STAGE"/*.part; do [ "$old" = "$STAGE/$HASH.part" ] || rm -f "$old"; done
    if [ -f "$STAGE/$HASH.part" ]; then
        say "part $(wc -c <"$STAGE/$HASH.part") $(sha256sum <"$STAGE/$HASH.part" | cut -d' ' -f1)"
    else
        say 'part 0 -'
    fi
}

drop_part() {
    rm -f "$STAGE/$HASH.part"
    say 'done'
}

# note KIND WHAT: once.
note() {
    [ -e "$MANIFEST" ] || : >"$MANIFEST" || fail "cannot write $MANIFEST"
    grep -qxF -e "$1 $2" "$MANIFEST" || echo "$1 $2" >>"$MANIFEST" || fail "cannot write $MANIFEST"
}

# make_dir DIR: and all above it.
make_dir() {
    [ -d "$1" ] && return
    make_dir "$(dirname "$1")"
    note dir "$1"
    mkdir "$1" || fail "cannot make $1"
}

# make_tree DIR: one that goes with all that comes into it.
make_tree() {
    [ -d "$1" ] && return
    make_dir "$(dirname "$1")"
    note tree "$1"
    mkdir "$1" || fail "cannot make $1"
}

# own FILE: may be written: it is new, or attach made it before.
own() {
    make_dir "$(dirname "$1")"
    if [ -e "$1" ] || [ -h "$1" ]; then
        grep -qxF -e "file $1" "$MANIFEST" || fail "$1 is there already and attach did not make it; move it away"
    fi
    note file "$1"
}

# Unpacks the package, puts it in place by one rename each, and writes the unit.
place() {
    owned
    : >>"$MANIFEST" || fail "cannot write $MANIFEST"
    note mode "$MODE"
    note controller "$CONTROLLER"
    note name "$NAME"
    note service "$SERVICE"
    [ -z "${LISTENS:-}" ] || note tunnel "$LISTENS"
    make_tree "$LIBRARY"
    if [ ! -d "$LIBRARY/$HASH" ]; then
        rm -rf "$LIBRARY"/.new
        mkdir "$LIBRARY/.new" || fail "cannot make $LIBRARY/.new"
        # A copy, so that whoever logged in cannot change what was looked at.
        cp "$STAGE/$HASH.part" "$LIBRARY/.new/package" || unplaced 'the package cannot be copied'
        echo "$HASH  $LIBRARY/.new/package" | sha256sum -c --status ||
            { rm -f "$STAGE/$HASH.part" && unplaced 'the package arrived damaged; run it again'; }
        tar -xzf "$LIBRARY/.new/package" --no-same-owner -C "$LIBRARY/.new" || unplaced 'the package cannot be unpacked'
        rm -f "$LIBRARY/.new/package"
        bin=$(find "$LIBRARY/.new" -maxdepth 3 -path '*bin/agentd' -type f | head -n 1)
        [ -n "$bin" ] || unplaced 'there is no bin/agentd in the package'
        chmod -R go-w,a+rX "$LIBRARY/.new"
        said=$("$bin" --version 2>&1) || unplaced "the programs do not run here: $(printf '%s' "$said" | tail -n 1)"
        mv "$(dirname "$bin")" "$LIBRARY/$HASH" || unplaced 'cannot put it in place'
        rm -rf "$LIBRARY/.new"
        sync -f "$LIBRARY" 2>/dev/null
    fi
    for program in "$LIBRARY/$HASH"/*; do
        link=$PREFIX/bin/${program##*/}
        own "$link"
        ln -sfn "$program" "$link.new" && mv -fT "$link.new" "$link" || fail "cannot write $link"
    done
    rm -f "$STAGE/$HASH.part"
    [ -z "${LISTENS:-}" ] || tunnel >"$LIBRARY/tunnel.sh" || fail "cannot write $LIBRARY/tunnel.sh"
    make_tree "$STATE"
    chmod 711 "$STATE"
    [ "$MODE" = user ] || make_tree /run/agentd
    case $SERVICE in
        systemd)
            # systemd makes it where it is missing, and leaves it.
            make_dir /etc/agentd
            own "$UNITS/agentd.service"
            own "$UNITS/agentjobs.slice"
            unit | sed "s#^ExecStart=.*#ExecStart=$PREFIX/bin/agentd run#" >"$UNITS/agentd.service.new" &&
                mv -f "$UNITS/agentd.service.new" "$UNITS/agentd.service" || fail "cannot write $UNITS/agentd.service"
            slice >"$UNITS/agentjobs.slice" || fail "cannot write $UNITS/agentjobs.slice"
            ;;
        user)
            own "$UNITS/agentd.service"
            user_unit >"$UNITS/agentd.service.new" && mv -f "$UNITS/agentd.service.new" "$UNITS/agentd.service" ||
                fail "cannot write $UNITS/agentd.service"
            ;;
    esac
    say 'done'
}

unplaced() {
    rm -rf "$LIBRARY/.new"
    fail "$* ($(df -Ph "$LIBRARY" | awk 'NR == 2 { print $4 }') free)"
}

user_unit() {
    cat <<UNIT
[Unit]
Description=Runs jobs of this user and answers for them
StartLimitIntervalSec=0

[Service]
Type=notify
NotifyAccess=main
ExecStart=$PREFIX/bin/agentd run --user --state-dir $STATE
TimeoutStartSec=10min
Restart=always
RestartSec=1
RestartPreventExitStatus=64 78
KillMode=process
Delegate=yes

[Install]
WantedBy=default.target
UNIT
}

# The file of keys of the user who logged in, and where it is.
keys() {
    KEYS=$HOME/.ssh/authorized_keys
    [ ! -h "$KEYS" ] || KEYS=$(readlink -f "$KEYS")
}

# Lets the controller's key in, for the tunnel and nothing else. The line says what was made for it.
authorize() {
    places
    keys
    made=$(sed -n 's/.* \(agentd-tunnel.*\)/\1/p' "$KEYS" 2>/dev/null | tail -n 1)
    made=${made:-agentd-tunnel}
    [ -e "$KEYS" ] || made="$made file"
    if [ ! -d "$HOME/.ssh" ]; then
        made="$made directory"
        mkdir -m 700 "$HOME/.ssh" || fail "cannot make $HOME/.ssh"
    fi
    line="command=\"exec sh $(printf '%s' "$LIBRARY/tunnel.sh" | sed 's/[\\"]/\\&/g')\",restrict,port-forwarding"
    line="$line,permitlisten=\"127.0.0.1:$LISTENS\",permitopen=\"127.0.0.1:1\" $KEY"
    if grep -q ' agentd-tunnel' "$KEYS" 2>/dev/null; then without_key; fi
    # The last line of the file may lack its end. It gets one, which goes with the key.
    if [ -s "$KEYS" ] && [ -n "$(tail -c 1 "$KEYS")" ]; then
        made="$made newline"
        echo >>"$KEYS" || fail "cannot write $KEYS"
    fi
    (umask 077 && echo "$line $made" >>"$KEYS") || fail "cannot write $KEYS"
    say 'done'
}

# without_key [END]: the file stays the same one, with its owner and mode, and loses END, the end of its last line.
without_key() {
    left=$(sed '/ agentd-tunnel/d' "$KEYS" && echo x) || fail "cannot read $KEYS"
    left=${left%x}
    printf '%s' "${left%"${1:-}"}" >"$KEYS" || fail "cannot write $KEYS"
}

unauthorize() {
    keys
    made=$(sed -n 's/.* agentd-tunnel//p' "$KEYS" 2>/dev/null | tail -n 1)
    if [ -f "$KEYS" ] && grep -q ' agentd-tunnel' "$KEYS"; then
        end=
        # Lines that came later keep the ends of theirs.
        case $made in *newline*) tail -n 1 "$KEYS" | grep -q ' agentd-tunnel' && end='
' ;; esac
        without_key "$end"
    fi
    case $made in *file*) [ -s "$KEYS" ] || rm -f "$KEYS" ;; esac
    case $made in *directory*) rmdir "$HOME/.ssh" 2>/dev/null ;; esac
    say 'done'
}

as_user() { [ $MODE = system ] || echo "--user --state-dir $STATE"; }

# Joins with a token that is told on standard input and nowhere else. A daemon that the controller sees is a member.
join() {
    owned
    if [ "$SEEN" = yes ] && running; then
        say 'done'
        return
    fi
    stop
    # shellcheck disable=SC2046
    said=$(
        [ -z "$NAME" ] || export AGENTD_NODE_NAME="$NAME"
        printf '%s\n' "$TOKEN" | "$LIBRARY/$HASH/agentd" join "$ADDRESS" --token-file - $(as_user) 2>&1
    )
    code=$?
    [ $code = 0 ] || fail "$(printf '%s' "$said" | tr '\n' ' ')"
    say 'done'
}

# The processes of programs that attach put there: all, or those of one name.
processes() {
    for at in /proc/[0-9]*; do
        case $(readlink "$at/exe" 2>/dev/null) in
            "$LIBRARY/"*"/${1:-}"*) echo "${at#/proc/}" ;;
        esac
    done
}

# Starts it, or lets it be if it runs already as it should.
start() {
    owned
    case $SERVICE in
        systemd)
            systemctl daemon-reload && systemctl enable -q agentd.service || fail 'systemd does not take the unit'
            running || systemctl restart agentd.service || fail "the service does not start: $(journalctl -qu agentd -n 1 -o cat)"
            ;;
        user)
            if ! loginctl show-user "$(id -un)" -p Linger 2>/dev/null | grep -q yes; then
                note linger "$(id -un)"
                loginctl enable-linger 2>/dev/null || say 'lingers no'
            fi
            systemctl --user daemon-reload && systemctl --user enable -q agentd.service || fail 'systemd does not take the unit'
            running || systemctl --user restart agentd.service || fail 'the service does not start'
            ;;
        plain)
            if ! running; then
                stop
                # shellcheck disable=SC2046
                setsid "$PREFIX/bin/agentd" run $(as_user) >>"$STATE/agentd.log" 2>&1 9>&- &
            fi
            ;;
    esac
    say 'done'
}

running() {
    for pid in $(processes agentd); do
        [ "$(readlink "/proc/$pid/exe")" = "$LIBRARY/$HASH/agentd" ] && return 0
    done
    return 1
}

# ended SECONDS SIGNAL NAME: signals them, and waits until they are gone.
ended() {
    left=$(($1 * 10))
    while pids=$(processes "$3") && [ -n "$pids" ]; do
        # shellcheck disable=SC2086
        [ $((left % 100)) -eq 0 ] && kill "-$2" $pids 2>/dev/null
        [ $left -gt 0 ] || return 1
        left=$((left - 1))
        sleep 0.1
    done
}

stop() {
    case $SERVICE in
        systemd) systemctl disable -q --now agentd.service 2>/dev/null ;;
        user) systemctl --user disable -q --now agentd.service 2>/dev/null ;;
    esac
    ended 40 TERM agentd || ended 10 KILL agentd || fail 'the daemon does not end'
}

# Why it may not be a node yet.
trouble() {
    places
    case $SERVICE in
        systemd) journalctl -qu agentd -n 3 -o cat ;;
        user) journalctl -q --user-unit agentd -n 3 -o cat ;;
        *) tail -n 3 "$STATE/agentd.log" ;;
    esac 2>/dev/null | sed 's/^/agentd-attach log /'
    running && say 'running yes'
    say 'done'
}

# Takes away all that attach made, the last first.
remove() {
    owned
    [ -e "$MANIFEST" ] || { say absent && say 'done' && exit 0; }
    SERVICE=$(noted "$MANIFEST" service)
    stop
    ended 10 TERM '' || ended 10 KILL '' || fail 'processes of jobs do not end'
    tac "$MANIFEST" | while read -r kind what; do
        case $kind in
            file) rm -f "$what" "$what.new" || fail "cannot remove $what" ;;
            tree) rm -rf "$what" || fail "cannot remove $what" ;;
            dir) rmdir "$what" 2>/dev/null || [ ! -e "$what" ] || say "kept $what" ;;
            linger) loginctl disable-linger "$what" 2>/dev/null ;;
        esac
    done || exit 3
    case $SERVICE in
        systemd) systemctl daemon-reload 2>/dev/null ;;
        user) systemctl --user daemon-reload 2>/dev/null ;;
    esac
    rm -f "$MANIFEST"
    [ -h "$STAGE" ] || rm -f "$STAGE"/*.part
    say 'done'
}

# The shell that logged in is a child of the process of the connection.
SHELL_PARENT=$PPID
SSH_CLIENT_ADDRESS=${SSH_CLIENT:-}
SSH_CLIENT_ADDRESS=${SSH_CLIENT_ADDRESS%% *}
for verb in $VERB; do $verb </dev/null; done
