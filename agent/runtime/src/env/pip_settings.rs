//! The settings of pip that decide where packages come from: variables, and the files that pip reads.
//!
//! pip reads them itself. An installer in its place, and the identity of an environment, need the same settings:
//! packages with private names must never be looked for at a public index.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

/// The settings that are read from files; others are not needed.
const NAMES: [&str; 6] = ["index-url", "extra-index-url", "find-links", "no-index", "trusted-host", "cert"];

/// The settings as variables `PIP_…`: those of the files, overridden by the variables themselves.
pub(super) fn settings(vars: &BTreeMap<String, String>) -> BTreeMap<String, String> {
    let texts = files(vars).into_iter().filter_map(|path| fs::read_to_string(path).ok());
    let mut settings = texts.fold(BTreeMap::new(), |mut settings, text| {
        settings.extend(read(&text));
        settings
    });
    let said = vars.iter().filter(|(name, value)| name.starts_with("PIP_") && !value.trim().is_empty());
    settings.extend(said.map(|(name, value)| (name.clone(), value.clone())));
    settings
}

/// The files that pip reads; later ones override earlier ones.
fn files(vars: &BTreeMap<String, String>) -> Vec<PathBuf> {
    let var = |name: &str| vars.get(name).filter(|value| value.starts_with('/')).map(Path::new);
    let own = var("PIP_CONFIG_FILE").map(Path::to_owned);
    if vars.get("PIP_CONFIG_FILE").is_some_and(|value| value == "/dev/null") {
        return Vec::new();
    }
    let config = var("XDG_CONFIG_HOME").map(|dir| dir.join("pip/pip.conf"));
    let config = config.or_else(|| Some(var("HOME")?.join(".config/pip/pip.conf")));
    let of_user = [var("HOME").map(|home| home.join(".pip/pip.conf")), config, own];
    let of_machine = ["/etc/xdg/pip/pip.conf", "/etc/pip.conf"].map(PathBuf::from);
    of_machine.into_iter().chain(of_user.into_iter().flatten()).collect()
}

/// The settings of a file for every command and for `install`.
fn read(text: &str) -> BTreeMap<String, String> {
    let (mut global, mut install) = (BTreeMap::new(), BTreeMap::new());
    let (mut section, mut last) = (String::new(), None::<String>);
    for line in text.lines() {
        let plain = line.trim();
        if plain.is_empty() || plain.starts_with(['#', ';']) {
            continue;
        }
        if let Some(name) = plain.strip_prefix('[').and_then(|rest| rest.strip_suffix(']')) {
            (section, last) = (name.trim().to_ascii_lowercase(), None);
            continue;
        }
        let values: &mut BTreeMap<String, String> = match section.as_str() {
            "global" => &mut global,
            "install" => &mut install,
            _ => continue,
        };
        // A value may continue in indented lines.
        if line.starts_with([' ', '\t']) {
            if let Some(value) = last.as_ref().and_then(|name| values.get_mut(name)) {
                *value = format!("{value} {plain}").trim().to_owned();
            }
            continue;
        }
        let (name, value) = plain.split_once(['=', ':']).unwrap_or((plain, ""));
        let name = name.trim().to_ascii_lowercase().replace('_', "-");
        last = NAMES
            .contains(&name.as_str())
            .then(|| format!("PIP_{}", name.to_ascii_uppercase().replace('-', "_")));
        if let Some(name) = &last {
            values.insert(name.clone(), value.trim().to_owned());
        }
    }
    global.extend(install);
    global
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn test_files_of_pip_are_read_and_variables_count_more() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("pip.conf");
        let text = "[global]\nindex-url = https://inside/simple\nextra_index_url =\n    https://a/simple\n    https://b/simple\n\
                    timeout = 9\n# find-links = /x\n[install]\nno-index: true\n[freeze]\ncert = /c\n";
        fs::write(&file, text).unwrap();
        let vars = |more: &[(&str, &str)]| -> BTreeMap<String, String> {
            let own = [("PIP_CONFIG_FILE", file.to_str().unwrap()), ("HOME", "/nowhere")];
            own.iter().chain(more).map(|(name, value)| ((*name).to_owned(), (*value).to_owned())).collect()
        };
        let found = settings(&vars(&[]));
        assert_eq!(found["PIP_INDEX_URL"], "https://inside/simple");
        assert_eq!(found["PIP_EXTRA_INDEX_URL"], "https://a/simple https://b/simple");
        assert_eq!(found["PIP_NO_INDEX"], "true");
        assert!(!found.contains_key("PIP_TIMEOUT"));
        let found = settings(&vars(&[("PIP_INDEX_URL", "https://other")]));
        assert_eq!(found["PIP_INDEX_URL"], "https://other");
    }
}
