# What the scripts of this repository share: saying what they do, and making sure a tool is there.
# Sourced, never run.

say() { printf '==> %s\n' "$*" >&2; }

fail() {
    printf 'error: %s\n' "$1" >&2
    shift
    for line in "$@"; do printf '  %s\n' "$line" >&2; done
    exit 1
}

# Where LATER is set, what is missing is only noted here, for one installation of all of it by `install_noted`.
LATER= noted=() noted_packages=()

install_noted() {
    LATER=
    [ "${#noted[@]}" -eq 0 ] || install_or_explain "$(IFS=,; echo "${noted[*]}" | sed 's/,/, /g')" "${noted_packages[@]}"
    noted=() noted_packages=()
}

# install_or_explain WHAT PACKAGE...: by apt where this user may, otherwise says exactly what to install.
install_or_explain() {
    local what=$1 as_root=()
    shift
    if [ -n "$LATER" ]; then
        noted+=("$what") noted_packages+=("$@")
        return
    fi
    if [ "$(id -u)" -ne 0 ]; then
        command -v sudo >/dev/null && sudo -n true 2>/dev/null && as_root=(sudo -n) || as_root=(false)
    fi
    if [ "${as_root[0]:-}" != false ] && command -v apt-get >/dev/null; then
        say "installing $*"
        "${as_root[@]}" apt-get update -qq || true # an old list may still serve
        if "${as_root[@]}" env DEBIAN_FRONTEND=noninteractive \
            apt-get install -y -qq --no-install-recommends "$@" >/dev/null; then
            return
        fi
    fi
    fail "$what is missing" "install it and try again, on Debian or Ubuntu: sudo apt-get install $*"
}

# require COMMAND WHAT PACKAGE...
require() {
    local command=$1 what=$2
    shift 2
    command -v "$command" >/dev/null || install_or_explain "$what" "$@"
}

# The compiler version the workspace asks for, from Cargo.toml.
require_rust() {
    local wanted have
    wanted=$(sed -n 's/^rust-version = "\(.*\)"$/\1/p' Cargo.toml)
    [ -x "$HOME/.cargo/bin/cargo" ] && PATH="$HOME/.cargo/bin:$PATH"
    command -v cargo >/dev/null ||
        fail "Rust $wanted or newer is missing" 'install it with rustup and try again'
    have=$(rustc --version | cut -d' ' -f2 | cut -d- -f1)
    [ "$(printf '%s\n' "$wanted" "$have" | sort -V | head -n1)" = "$wanted" ] ||
        fail "Rust $wanted or newer is needed, this is $have" 'update it with: rustup update stable'
}
