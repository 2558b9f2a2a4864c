//! What went wrong on a machine, as a fault with what to do about it.

use agent_attach::{AttachError, ConnectError};
use agent_model::{Code, Fault};

/// The fault of an error, on this host.
pub(super) fn fault(host: &str, error: &AttachError) -> Fault {
    match error {
        AttachError::Target(error) => Fault::new(Code::HostLogin, error.to_string())
            .fix("write it as USER@HOST, or as a name of ~/.ssh/config"),
        AttachError::Connect(error) => not_connected(error),
        AttachError::Command(_) => broken(host, error).fix("run it again: it goes on where it was"),
        AttachError::Odd { said, .. } => Fault::new(Code::HostLogin, error.to_string())
            .why(said.clone())
            .fix("its login shell must run commands: see what `ssh HOST true` says, and its .bashrc"),
        AttachError::Step { .. } => broken(host, error).fix("mend that, then run it again"),
        AttachError::NotRoot => broken(host, error)
            .fix("give the password of sudo, by the terminal or --password-stdin; or log in as somebody who is root"),
        AttachError::NobodyToAsk => broken(host, error)
            .fix("give it with --password-stdin <FILE; or say --no-sudo: then it is installed for that user alone"),
        AttachError::Held(_) => broken(host, error).fix("wait until that one is done, then run it again"),
        AttachError::Package(_) => broken(host, error).fix("name the .tar.gz of a release: --package FILE"),
    }
}

fn broken(host: &str, error: &AttachError) -> Fault {
    Fault::new(Code::HostUnfinished, format!("{host} is not set up to the end")).because(error)
}

fn not_connected(error: &ConnectError) -> Fault {
    let key = |fix: String| Fault::new(Code::HostKey, error.to_string()).fix(fix);
    match error {
        ConnectError::KeyChanged { known, .. } => key(format!(
            "somebody may sit in between. If the machine is new, and you know its key: remove {known}, and run it again"
        )),
        ConnectError::KeyRevoked { said, .. } => {
            key(format!("do not trust it: {said} says so. Make the machine a new key"))
        }
        ConnectError::KeyUnknown { .. } => key(
            "compare it with `ssh-keygen -lf /etc/ssh/ssh_host_ed25519_key.pub` there, then say --fingerprint SHA256:..., or \
             --accept-new"
                .to_owned(),
        ),
        ConnectError::Refused { tried, .. } => Fault::new(Code::HostLogin, error.to_string())
            .why(tried.clone())
            .fix("name the key (--key FILE), or give a password: --password-stdin"),
        ConnectError::Unreachable { .. } => Fault::new(Code::HostLogin, error.to_string())
            .because(error)
            .fix("check its name, port and firewall, and that sshd runs"),
        ConnectError::TurnedAway { .. } => Fault::new(Code::HostLogin, error.to_string()).fix(
            "it lets you in later: --timeout 5m; or there, in sshd_config: a greater `MaxStartups`, or this address in \
             `PerSourcePenaltyExemptList`",
        ),
        _ => Fault::new(Code::HostLogin, error.to_string()).because(error).fix("run it again; see also the log of its sshd"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn test_a_changed_key_names_its_line() {
        let known = agent_attach::Place { file: "/h/.ssh/known_hosts".into(), line: 7 };
        let error = ConnectError::KeyChanged { host: "box".into(), shown: "SHA256:x".into(), known };
        let fault = fault("box", &AttachError::from(error));
        assert_eq!(fault.code, Code::HostKey);
        assert!(fault.fix.unwrap_or_default().contains("/h/.ssh/known_hosts, line 7"));
    }
}
