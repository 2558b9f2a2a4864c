//! The default paths of a daemon, so that daemon and client agree without configuration.

use std::path::{Path, PathBuf};

use crate::address::MAX_SOCKET_PATH;

/// The state directory of a daemon and the socket clients find it at.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Places {
    /// Everything the daemon keeps.
    pub state_dir: PathBuf,
    /// Its unix socket.
    pub socket: PathBuf,
}

impl Places {
    /// Of a daemon installed on the machine.
    pub fn system() -> Places {
        Places { state_dir: "/var/lib/agentd".into(), socket: "/run/agentd/agentd.sock".into() }
    }

    /// Of a daemon that a user started; `None` when neither `XDG_DATA_HOME` nor `HOME` is set.
    pub fn user(variable: impl Fn(&str) -> Option<String>) -> Option<Places> {
        let absolute = |name| variable(name).map(PathBuf::from).filter(|path| path.is_absolute());
        let data = absolute("XDG_DATA_HOME").or_else(|| Some(absolute("HOME")?.join(".local/share")))?;
        let places = Places::below(&data.join("agentd"));
        let runtime = absolute("XDG_RUNTIME_DIR").map(|runtime| runtime.join("agentd.sock"));
        Some(match runtime {
            // The system takes no longer path for a socket than so, and some homes are deep.
            Some(socket) if places.socket.as_os_str().len() > MAX_SOCKET_PATH => Places { socket, ..places },
            _ => places,
        })
    }

    /// Of a daemon that keeps everything in one directory.
    pub fn below(state_dir: &Path) -> Places {
        Places { state_dir: state_dir.to_owned(), socket: state_dir.join("agentd.sock") }
    }
}

/// Data of a user's programs that may be lost at any time; `None` when neither `XDG_CACHE_HOME` nor `HOME` is set.
pub fn user_cache(variable: impl Fn(&str) -> Option<String>) -> Option<PathBuf> {
    let absolute = |name| variable(name).map(PathBuf::from).filter(|path| path.is_absolute());
    let cache = absolute("XDG_CACHE_HOME").or_else(|| Some(absolute("HOME")?.join(".cache")))?;
    Some(cache.join("agentd"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn test_user_places_follow_xdg_then_home() {
        let env = |pairs: &'static [(&str, &str)]| {
            move |name: &str| pairs.iter().find(|(n, _)| *n == name).map(|(_, v)| (*v).to_owned())
        };
        let at = |pairs| Places::user(env(pairs)).map(|places| places.state_dir);
        assert_eq!(at(&[("HOME", "/h"), ("XDG_DATA_HOME", "/x")]), Some("/x/agentd".into()));
        assert_eq!(at(&[("HOME", "/h"), ("XDG_DATA_HOME", "rel")]), Some("/h/.local/share/agentd".into()));
        assert_eq!(at(&[]), None);
        let deep: &'static str = Box::leak(format!("/{}", "h".repeat(90)).into_boxed_str());
        let socket = |pairs: Vec<(&'static str, &'static str)>| {
            Places::user(env(Vec::leak(pairs))).map(|places| places.socket.display().to_string())
        };
        assert!(socket(vec![("HOME", deep)]).unwrap().starts_with(deep), "there is no other place");
        let near = socket(vec![("HOME", deep), ("XDG_RUNTIME_DIR", "/run/user/7")]);
        assert_eq!(near.as_deref(), Some("/run/user/7/agentd.sock"));
        let short = socket(vec![("HOME", "/h"), ("XDG_RUNTIME_DIR", "/run/user/7")]);
        assert_eq!(short.as_deref(), Some("/h/.local/share/agentd/agentd.sock"));
        let cache = |pairs| user_cache(env(pairs));
        assert_eq!(cache(&[("HOME", "/h"), ("XDG_CACHE_HOME", "/x")]), Some("/x/agentd".into()));
        assert_eq!(cache(&[("HOME", "/h"), ("XDG_CACHE_HOME", "rel")]), Some("/h/.cache/agentd".into()));
        assert_eq!(cache(&[]), None);
    }
}
