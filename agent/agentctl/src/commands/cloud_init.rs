//! User data for cloud-init: what a new machine does at its first boot to become a node.
//!
//! The token is in a file that only root can read and that is deleted when the machine has joined; it is in no
//! argument. Everything is retried for a while, because the network, a mirror or the controller may be available
//! later than the machine.

use crate::failure::Failure;

/// Where the agentd of a new machine comes from.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Package {
    /// The image has it.
    InImage,
    /// It is fetched from an address, and must have the digest if one is known.
    At { url: String, sha256: String },
}

impl Package {
    /// Reads `URL` or `URL#sha256=DIGEST`; an empty text means that the image has it.
    pub(super) fn parse(text: &str) -> Result<Package, Failure> {
        if text.is_empty() {
            return Ok(Package::InImage);
        }
        let refused = |what: &str, fix: &str| Err(Failure::refused(format!("`{text}` {what}"), fix));
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

/// The user data, as a text that `cloud-init schema` accepts, for the form in which a machine is ordered.
pub(super) fn user_data(controller: &str, token: &str, package: &Package) -> String {
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
         persist agentd join '{controller}' --token-file token\n\
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

#[cfg(test)]
mod tests {
    use super::*;

    fn refusal(text: &str) -> String {
        match Package::parse(text) {
            Err(Failure::Refused { what, .. }) => what,
            other => panic!("{text}: {other:?}"),
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
        for package in ["", "https://a.lab/x.deb"] {
            let text =
                user_data("https://c.lab:7443", "agentd-join-secret", &Package::parse(package).unwrap());
            assert!(text.starts_with("#cloud-config\n"));
            let entry = "  - path: /run/agentd-join/token\n    permissions: '0600'\n    content: 'agentd-join-secret'\n";
            assert!(text.contains(entry), "{text}");
            assert_eq!(text.matches("agentd-join-secret").count(), 1);
            assert!(text.contains("agentd join 'https://c.lab:7443' --token-file token\n"));
            assert_eq!(text.contains("apt-get install"), !package.is_empty());
        }
    }
}
