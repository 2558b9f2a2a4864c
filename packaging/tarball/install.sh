#!/bin/sh
# Installs agentd for one user of a machine, without root: programs below ~/.local, a service of the user where systemd
# gives one. Run again from a newer archive it upgrades; jobs go on. It writes down what it made, and removes just that.
#
#   ./install.sh                       install or upgrade
#   ./install.sh --no-service          the same without a service: agentctl starts the daemon when it is needed
#   ./install.sh --uninstall           remove it; jobs, their outputs and the configuration stay
#   ./install.sh --uninstall --purge   remove those as well
set -eu

say() { printf '%s\n' "$*"; }
fail() {
    printf 'error: %s\n  fix: %s\n' "$1" "$2" >&2
    exit 1
}

mode=install service=yes purge=
for argument in "$@"; do
    case $argument in
    --no-service) service= ;;
    --uninstall) mode=uninstall ;;
    --purge) purge=yes ;;
    -h | --help) sed -n '2,9s/^# \{0,1\}//p' "$0" && exit 0 ;;
    *) fail "unknown argument $argument" "see: $0 --help" ;;
    esac
done
[ -z "$purge" ] || [ "$mode" = uninstall ] || fail '--purge removes' "write: $0 --uninstall --purge"
case ${HOME:-} in /*) ;; *) fail 'HOME is not set to a directory' 'set it and try again' ;; esac
[ "$(id -u)" -ne 0 ] || fail 'this is for users without root' 'as root, install the package: apt install ./agentd_*.deb ./agentctl_*.deb'

here=$(cd "$(dirname "$0")" && pwd)
data=${XDG_DATA_HOME:-$HOME/.local/share} config=${XDG_CONFIG_HOME:-$HOME/.config} cache=${XDG_CACHE_HOME:-$HOME/.cache}
lib=$HOME/.local/lib/agentd bin=$HOME/.local/bin units=$config/systemd/user
made=$lib/made # one a line: "file PATH", "dir PATH" or "linger USER", in the order they were made

# note WHAT: remembers it, once.
note() { grep -qxF "$1" "$made" || printf '%s\n' "$1" >>"$made"; }

# A directory and those above it, each remembered if it was not there.
make_dir() {
    [ -d "$1" ] && return
    make_dir "$(dirname "$1")"
    mkdir "$1"
    missing="${missing:+$missing
}dir $1"
}

# put MODE FROM TO: in one step, so that whoever starts it meanwhile finds the old one or the new one.
put() {
    cp "$2" "$3.new"
    chmod "$1" "$3.new"
    mv -f "$3.new" "$3"
    note "file $3"
}

manager() { command -v systemctl >/dev/null && systemctl --user show-environment >/dev/null 2>&1; }

# Only what this made before, or what is not there, is written.
check_place() {
    for name in agentd agentctl; do
        [ ! -e "$bin/$name" ] && [ ! -L "$bin/$name" ] && continue
        [ "$(readlink "$bin/$name")" = "$lib/$name" ] ||
            fail "$bin/$name is there and is not of this" 'move it away and try again'
    done
}

install_programs() {
    missing=
    for directory in "$lib" "$lib/providers" "$bin"; do make_dir "$directory"; done
    touch "$made"
    printf '%s\n' "$missing" | while read -r line; do [ -z "$line" ] || note "$line"; done
    for program in agentd agentctl agent-shim agent-env; do put 755 "$here/bin/$program" "$lib/$program"; done
    for program in "$here"/providers/*; do
        rights=644
        [ ! -x "$program" ] || rights=755
        put "$rights" "$program" "$lib/providers/$(basename "$program")"
    done
    put 755 "$here/install.sh" "$lib/install.sh"
    for document in copyright third-party-licences; do put 644 "$here/$document" "$lib/$document"; done
    for program in agentd agentctl; do
        ln -sfn "$lib/$program" "$bin/$program"
        note "file $bin/$program"
    done
    say "installed $("$lib/agentctl" --version) in $lib, with links in $bin"
    case ":$PATH:" in *":$bin:"*) ;; *) say "$bin is not on your PATH: add it, in ~/.profile for example" ;; esac
}

install_service() {
    if [ -z "$service" ] || ! manager; then
        say 'no service: agentctl run starts the daemon when none runs. One that runs is what it was: agentctl stop; jobs go on'
        return
    fi
    missing=
    make_dir "$units"
    printf '%s\n' "$missing" | while read -r line; do [ -z "$line" ] || note "$line"; done
    sed "s|@LIB@|$lib|" "$here/systemd/user/agentd.service" >"$lib/unit"
    put 644 "$lib/unit" "$units/agentd.service"
    rm -f "$lib/unit"
    systemctl --user daemon-reload
    # One that agentctl started goes; its jobs go on under the service.
    "$lib/agentctl" --quiet --socket "$data/agentd/agentd.sock" stop >/dev/null 2>&1 || true
    systemctl --user enable --quiet agentd.service
    systemctl --user restart agentd.service || fail 'the service does not start' 'see why: journalctl --user -u agentd'
    say 'the service runs: systemctl --user status agentd'
    if [ "$(loginctl show-user "$(id -un)" --property=Linger --value 2>/dev/null)" = yes ]; then
        say 'it goes on when you log out, and starts with the machine'
    elif loginctl --no-ask-password enable-linger >/dev/null 2>&1; then
        note "linger $(id -un)"
        say 'you linger now: it goes on when you log out, and starts with the machine'
    else
        say "it ends when you log out; jobs too, as the machine may decide. An operator can change that: sudo loginctl enable-linger $(id -un)"
    fi
}

remove() {
    [ -f "$made" ] || fail "nothing is installed in $lib" 'it may have been installed by another user, or as a package'
    if manager && [ -f "$units/agentd.service" ]; then
        systemctl --user disable --quiet --now agentd.service || true
    else
        "$lib/agentctl" --quiet --socket "$data/agentd/agentd.sock" stop >/dev/null 2>&1 || true
    fi
    if [ -n "$purge" ]; then
        for kept in "$data/agentd" "$config/agentd" "$config/agentctl" "$cache/agentd"; do
            [ -e "$kept" ] || continue
            say "removing $kept ($(du -sh "$kept" 2>/dev/null | cut -f1))"
            chmod -R u+w "$kept" 2>/dev/null || true
            rm -rf "$kept"
        done
    else
        say "jobs, outputs and configuration stay: $data/agentd, $config/agentd"
    fi
    list=$(cat "$made")
    rm -f "$made" "$units/default.target.wants/agentd.service"
    printf '%s\n' "$list" | while read -r kind what; do
        case $kind in
        file) rm -f "$what" ;;
        linger) loginctl --no-ask-password disable-linger >/dev/null 2>&1 || true ;;
        esac
    done
    rmdir "$units/default.target.wants" 2>/dev/null || true
    # Those below go first. One that somebody else uses now is not empty, and stays.
    printf '%s\n' "$list" | sed -n 's/^dir //p' | sort -r | while read -r directory; do rmdir "$directory" 2>/dev/null || true; done
    if manager; then systemctl --user daemon-reload; fi
    say 'removed agentd'
}

if [ "$mode" = uninstall ]; then
    remove
    exit 0
fi
[ "$(uname -s) $(uname -m)" = 'Linux x86_64' ] || fail "these programs are for Linux on x86_64, not $(uname -s) $(uname -m)" 'build agentd from its source there'
"$here/bin/agentctl" --version >/dev/null 2>&1 || fail "$here/bin/agentctl does not run here" 'the C library must be glibc 2.31 or newer: see ldd --version'
check_place
install_programs
install_service
