//! What a new machine does to become a node, as texts: user data for cloud-init, and a script for a shell.
//!
//! Owns every word of them. The token is in no argument: cloud-init keeps it in a file that only root can read and that
//! is deleted when the machine has joined, and the script gives it to `agentd join` by standard input. Joining is
//! repeated for a while, because the network, a mirror or the controller may be available later than the machine.

use std::fmt::Write as _;

use serde::{Deserialize, Serialize};

use crate::NodeId;
use crate::node::Slots;

/// Where the agentd of a new machine comes from.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Package {
    /// The image has it.
    #[default]
    InImage,
    /// It is fetched from an address, and must have the digest if one is known.
    At {
        /// The address.
        url: String,
        /// The SHA-256 in hexadecimal digits; empty if it is not known.
        sha256: String,
    },
}

/// Why a text names no package.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("`{text}` {what}")]
pub struct PackageError {
    text: String,
    what: &'static str,
    /// What to write instead.
    pub fix: &'static str,
}

impl Package {
    /// Reads `URL` or `URL#sha256=DIGEST`; an empty text means that the image has it.
    pub fn parse(text: &str) -> Result<Package, PackageError> {
        if text.is_empty() {
            return Ok(Package::InImage);
        }
        let refused = |what, fix| Err(PackageError { text: text.to_owned(), what, fix });
        let (url, fragment) = text.split_once('#').unwrap_or((text, ""));
        let sha256 = fragment.strip_prefix("sha256=").unwrap_or_default();
        let is_digest = sha256.len() == 64 && sha256.bytes().all(|b| matches!(b, b'0'..=b'9' | b'a'..=b'f'));
        // In the shell's quotes and the YAML block around them these have no special meaning.
        let is_plain = url.bytes().all(|b| b.is_ascii_alphanumeric() || b"-._~:/?[]@!&()*+,;=%".contains(&b));
        let is_web =
            ["https://", "http://"].iter().any(|scheme| url.len() > scheme.len() && url.starts_with(scheme));
        if !is_web || !is_plain {
            return refused(
                "is no address of a package",
                "write it as https://HOST/agentd_VERSION_amd64.deb",
            );
        }
        if !fragment.is_empty() && !is_digest {
            return refused(
                "ends in something that is no digest",
                "write it as URL#sha256=DIGEST, from: sha256sum FILE",
            );
        }
        if url.starts_with("http://") && fragment.is_empty() {
            return refused(
                "is not encrypted, and new machines would run what it gives as root",
                "name an https address, or what must come: URL#sha256=DIGEST, from: sha256sum FILE",
            );
        }
        Ok(Package::At { url: url.to_owned(), sha256: sha256.to_owned() })
    }
}

/// How a machine joins. The address and the token are the controller's own words, and have no quotes in them.
#[derive(Clone, Copy)]
pub struct Joining<'a> {
    /// `https://HOST:PORT` of the controller.
    pub controller: &'a str,
    /// Whoever reads it can add a machine.
    pub token: &'a str,
    /// What the node is called; otherwise as its machine calls itself.
    pub name: Option<&'a NodeId>,
    /// How many jobs it runs at a time; otherwise what its configuration says.
    pub slots: Option<Slots>,
}

impl std::fmt::Debug for Joining<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Joining")
            .field("controller", &self.controller)
            .field("name", &self.name)
            .finish_non_exhaustive()
    }
}

/// Fetches the package with Python, which cloud-init itself needs, and checks its digest if there is one.
const FETCH: &str = "\
import hashlib, sys, urllib.request
url, digest, path = sys.argv[1:]
body = urllib.request.urlopen(url, timeout=60).read()
found = hashlib.sha256(body).hexdigest()
if digest not in ('', found):
    sys.exit(f'{url} has the digest {found}, not {digest}')
open(path, 'wb').write(body)
";

/// Says to systemd how many jobs run at a time.
fn drop_in(slots: Slots) -> String {
    format!(
        "mkdir -p /etc/systemd/system/agentd.service.d\n\
         printf '[Service]\\nEnvironment=AGENTD_SLOTS={slots}\\n' >/etc/systemd/system/agentd.service.d/slots.conf\n\
         systemctl daemon-reload\n"
    )
}

/// The user data, as a text that `cloud-init schema` accepts, for the form in which a machine is ordered.
pub fn cloud_init(joining: &Joining<'_>, package: &Package) -> String {
    let Joining { controller, token, name, slots } = joining;
    let have = match package {
        Package::InImage => {
            "command -v agentd >/dev/null || { echo 'agentd is not in this image' >&2; exit 1; }\n".to_owned()
        }
        Package::At { url, sha256 } => format!(
            "cat >fetch.py <<'PYTHON'\n{FETCH}PYTHON\n\
             persist python3 fetch.py '{url}' '{sha256}' /var/cache/agentd-join.deb\n\
             DEBIAN_FRONTEND=noninteractive persist \\\n    \
             apt-get install -y --no-install-recommends -o DPkg::Lock::Timeout=600 /var/cache/agentd-join.deb\n"
        ),
    };
    let name = name.map(|name| format!("export AGENTD_NODE_NAME='{name}'\n")).unwrap_or_default();
    let slots = slots.map(drop_in).unwrap_or_default();
    let script = format!(
        "set -eu\n\
         cd /run/agentd-join\n\
         trap 'rm -rf /run/agentd-join /var/cache/agentd-join.deb' EXIT\n\
         persist() {{\n    \
             tries=30\n    \
             until \"$@\"; do\n        \
                 tries=$((tries - 1))\n        \
                 [ \"$tries\" -gt 0 ] || {{ echo \"gave up: $*\" >&2; return 1; }}\n        \
                 sleep 10\n    \
             done\n\
         }}\n\
         {have}\
         systemctl stop agentd\n\
         {name}\
         persist agentd join '{controller}' --token-file token\n\
         {slots}\
         systemctl enable --now agentd\n"
    );
    let script: String = script.lines().map(|line| format!("      {line}\n")).collect();
    format!(
        "#cloud-config\n\
         # Makes a new machine a node of {controller} at its first boot. Whoever reads the token can add one.\n\
         write_files:\n  \
           - path: /run/agentd-join/token\n    \
             permissions: '0600'\n    \
             content: '{token}'\n  \
           - path: /run/agentd-join/join\n    \
             permissions: '0600'\n    \
             content: |\n{script}\
         runcmd:\n  \
           - [sh, /run/agentd-join/join]\n"
    )
}

/// The part of the script that is the same for all machines. A shell reads all of a function before it runs it, so
/// nothing in it can take the rest of the script for its input. 75 is the exit status of `agentd join` where a daemon
/// runs already.
const SCRIPT: &str = r#"
join() {
    own= background=
    for word in "$@"; do
        case $word in
        --user) own=--user ;;
        --background) background=yes ;;
        *) echo "the script that joins does not know $word" >&2 && return 64 ;;
        esac
    done
    [ "$(id -u)" -eq 0 ] || own=--user
    command -v agentd >/dev/null || { echo 'agentd is not on the PATH of this machine' >&2 && return 127; }
    service=
    if [ -z "$own" ] && [ -d /run/systemd/system ] && systemctl cat agentd.service >/dev/null 2>&1; then
        service=yes
        systemctl stop agentd
    fi
    [ -z "$name" ] || export AGENTD_NODE_NAME="$name"
    tries=30
    while :; do
        code=0
        printf '%s\n' "$token" | agentd $own join "$controller" --token-file - || code=$?
        [ "$code" -ne 0 ] || break
        [ "$code" -ne 75 ] || { echo 'a daemon runs here already' >&2 && return 0; }
        tries=$((tries - 1))
        [ "$tries" -gt 0 ] || { echo 'gave up joining' >&2 && return 1; }
        sleep 2
    done
    unset token AGENTD_NODE_NAME # the identity has the name from here on
    if [ -n "$service" ]; then
        [ -z "$slots" ] || limit_slots
        systemctl enable --now agentd
        return
    fi
    [ -z "$slots" ] || export AGENTD_SLOTS="$slots"
    [ -n "$own" ] || mkdir -p /run/agentd
    [ -n "$background" ] || exec agentd $own run
    log=/var/log/agentd.log
    [ -z "$own" ] || log=${AGENTD_STATE_DIR:-${XDG_DATA_HOME:-$HOME/.local/share}/agentd}/agentd.log
    nohup setsid agentd $own run >>"$log" 2>&1 </dev/null &
    echo $! >"$HOME/.agentd-pool.pid"
}
join "$@" </dev/null
"#;

/// A script for the standard input of `sh -s`, on a machine that has agentd, of root or of another user. It joins and
/// becomes the daemon; where systemd has the service it starts that, and with `--background` it leaves the daemon
/// running, with its number in `~/.agentd-pool.pid`. With `--user` root gets a daemon of its own, too. Done again it changes nothing.
pub fn script(joining: &Joining<'_>) -> String {
    let Joining { controller, token, name, slots } = joining;
    let name = name.map(NodeId::as_str).unwrap_or_default();
    let mut text = format!(
        "# Makes this machine a node of {controller}. Whoever reads the token can add one.\n\
         set -eu\n\
         controller='{controller}'\n\
         token='{token}'\n\
         name='{name}'\n"
    );
    // Writing to a string cannot fail.
    let _ = match slots {
        Some(slots) => write!(text, "slots={slots}\nlimit_slots() {{\n{}}}\n", drop_in(*slots)),
        None => writeln!(text, "slots="),
    };
    text + SCRIPT
}

#[cfg(test)]
mod tests {
    use super::*;

    fn refusal(text: &str) -> String {
        Package::parse(text).unwrap_err().to_string()
    }

    fn joining(name: Option<&NodeId>) -> Joining<'_> {
        Joining {
            controller: "https://c.lab:7443",
            token: "agentd-join-secret",
            name,
            slots: name.map(|_| Slots::Number(3)),
        }
    }

    #[test]
    fn test_a_package_is_named_by_an_address_that_can_be_trusted() {
        let digest = "0123456789abcdef".repeat(4);
        let at = |url: &str, sha256: &str| Package::At { url: url.to_owned(), sha256: sha256.to_owned() };
        assert_eq!(Package::parse("").unwrap(), Package::InImage);
        assert_eq!(Package::parse("https://a.lab/x.deb").unwrap(), at("https://a.lab/x.deb", ""));
        assert_eq!(
            Package::parse(&format!("http://a.lab/x.deb#sha256={digest}")).unwrap(),
            at("http://a.lab/x.deb", &digest)
        );
        assert!(refusal("http://a.lab/x.deb").contains("not encrypted"));
        assert!(refusal("https://a.lab/x.deb#sha256=12").contains("no digest"));
        for text in [
            "x.deb",
            "https://",
            "ftp://a/x.deb",
            "https://a/'; reboot",
            "https://a/$(reboot)",
            "https://a/\n",
        ] {
            assert!(refusal(text).contains("no address"), "{text}");
        }
    }

    #[test]
    fn test_user_data_holds_the_token_in_one_file_of_mode_0600_and_in_no_argument() {
        let name: NodeId = "gpu-1".parse().unwrap();
        for (package, name) in
            [("", None), ("https://a.lab/x.deb", None), ("https://a.lab/x.deb", Some(&name))]
        {
            let text = cloud_init(&joining(name), &Package::parse(package).unwrap());
            assert!(text.starts_with("#cloud-config\n"));
            let entry = "  - path: /run/agentd-join/token\n    permissions: '0600'\n    content: 'agentd-join-secret'\n";
            assert!(text.contains(entry), "{text}");
            assert_eq!(text.matches("agentd-join-secret").count(), 1);
            assert!(text.contains("agentd join 'https://c.lab:7443' --token-file token\n"));
            assert_eq!(text.contains("apt-get install"), !package.is_empty());
            assert_eq!(text.contains("export AGENTD_NODE_NAME='gpu-1'\n"), name.is_some());
            assert_eq!(text.contains("AGENTD_SLOTS=3"), name.is_some());
        }
    }

    #[test]
    fn test_the_script_holds_the_token_once_and_in_no_argument() {
        let name: NodeId = "gpu-1".parse().unwrap();
        for name in [None, Some(&name)] {
            let text = script(&joining(name));
            assert_eq!(text.matches("agentd-join-secret").count(), 1);
            assert!(text.contains("\ntoken='agentd-join-secret'\n"));
            assert_eq!(text.contains("name='gpu-1'\nslots=3\n"), name.is_some(), "{text}");
            assert!(text.ends_with("join \"$@\" </dev/null\n"));
        }
    }
}
