//! The default paths of a daemon, so that daemon and client agree without configuration.

use std::path::{Path, PathBuf};

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
        Some(Places::below(&data.join("agentd")))
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
        let cache = |pairs| user_cache(env(pairs));
        assert_eq!(cache(&[("HOME", "/h"), ("XDG_CACHE_HOME", "/x")]), Some("/x/agentd".into()));
        assert_eq!(cache(&[("HOME", "/h"), ("XDG_CACHE_HOME", "rel")]), Some("/h/.cache/agentd".into()));
        assert_eq!(cache(&[]), None);
    }
}
