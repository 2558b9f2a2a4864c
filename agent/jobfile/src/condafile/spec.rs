//! Valid packages and channels of a conda file.
//!
//! Not a parser of versions, which the solver has: enough to find text that was meant for another program (pip, a
//! shell, a template) while the place in the file is still known, and one spelling for equal meanings.

use super::Complaint;
use crate::requirement::holds_credentials;

const OPERATORS: [char; 5] = ['=', '<', '>', '!', '~'];
const KNOWN: [&str; 8] = ["=", "==", "!=", ">=", "<=", ">", "<", "~="];
/// Characters of a specification besides letters and digits.
const MARKS: &str = " _-.+*=!<>~|,:/[]()'\"^$%";
const CREDENTIALS: &str =
    "write the address without them; the node takes credentials from the file of its key `conda_credentials`";

/// A specification in one spelling, and a remark if it may not mean what its author thinks.
pub(super) fn tidy(text: &str) -> Result<(String, Option<String>), Complaint> {
    let text = text.split_whitespace().collect::<Vec<_>>().join(" ");
    meant_for_others(&text)?;
    let (channel, package) = match text.rsplit_once("::") {
        Some((channel, package)) => (Some(channel.trim()), package.trim()),
        None => (None, text.as_str()),
    };
    if let Some(channel) = channel {
        check_channel(channel)?;
    }
    if let Some(odd) = package.chars().find(|c| !c.is_ascii_alphanumeric() && !MARKS.contains(*c)) {
        return Err(odd_character(&text, odd));
    }
    let (core, brackets) = split_brackets(package)?;
    let name = leading_name(core);
    let rest = core[name.len()..].trim_start();
    if !name.starts_with(|c: char| c.is_ascii_alphanumeric() || c == '_') {
        return Err(Complaint::invalid(format!("`{text}` does not begin with the name of a package"), USUAL));
    }
    if !name.contains(|c: char| c.is_ascii_alphabetic()) {
        let message = format!("`{text}` is a number, not a package");
        return Err(Complaint::invalid(message, "write the name before it, for example `- python=3.11`"));
    }
    let glued = core[name.len()..].starts_with(|c: char| !c.is_whitespace() && !OPERATORS.contains(&c));
    if glued {
        let message = format!("`{text}`: after the name `{name}`, `{rest}` is no version");
        return Err(Complaint::invalid(
            message,
            format!("write a version as `- {name}=1.2` or `- {name}>=1.2`"),
        ));
    }
    let rest = squeeze(rest);
    let remark = check_version(&text, name, &rest)?;
    let separator = if rest.is_empty() || rest.starts_with(OPERATORS) { "" } else { " " };
    let prefix = channel.map(|channel| format!("{channel}::")).unwrap_or_default();
    Ok((format!("{prefix}{name}{separator}{rest}{brackets}"), remark))
}

const USUAL: &str = "write a name, and after it a version if one matters: `- numpy>=1.26`";

/// Lines that another tool would understand.
fn meant_for_others(text: &str) -> Result<(), Complaint> {
    if text.is_empty() {
        return Err(Complaint::invalid("`dependencies` has an entry that says nothing", "remove the line"));
    }
    if holds_credentials(text) {
        let message = "an address holds credentials, which would be stored with the job";
        return Err(Complaint::invalid(message, CREDENTIALS));
    }
    if text.starts_with('-') {
        let fix = "move the line into the list below `- pip:`";
        return Err(Complaint::invalid(format!("`{text}` is an option of pip, not a package of conda"), fix));
    }
    if text.contains("git+") || text.contains(" @ ") {
        let fix = "move the line into the list below `- pip:`";
        return Err(Complaint::invalid(format!("`{text}` is for pip, not a package of conda"), fix));
    }
    if text.contains("===") {
        let fix = "write `==` for exactly this version, or move the line into the list below `- pip:`";
        return Err(Complaint::invalid(format!("`{text}`: conda knows no `===`"), fix));
    }
    let file = [".conda", ".tar.bz2"].iter().any(|end| text.ends_with(end));
    if (text.contains("://") && !text.contains("::")) || file || text.starts_with(['.', '/']) {
        return Err(Complaint::unsupported(
            format!("`{text}` names a file instead of a package"),
            "name its channel, version and build: `- channel::name=1.2=build`, or give exact files as a `conda_lock`",
        ));
    }
    Ok(())
}

fn odd_character(text: &str, odd: char) -> Complaint {
    let message = match odd.is_control() {
        true => "a package's line holds a control character".to_owned(),
        false => format!("`{text}`: `{odd}` cannot stand in a package's line"),
    };
    let fix = match odd {
        '@' => "write a version as `- python=3.11`",
        ';' => {
            "only pip knows conditions: move the line into the list below `- pip:`, or leave out the condition"
        }
        '#' => "put a space before a comment",
        '{' | '}' | '`' | '&' | '\\' => "write what it stands for: nothing is replaced here",
        _ => USUAL,
    };
    Complaint::invalid(message, fix)
}

/// The text before the brackets, and the brackets.
fn split_brackets(package: &str) -> Result<(&str, &str), Complaint> {
    let Some(at) = package.find(['[', ']']) else { return Ok((package, "")) };
    let (core, brackets) = package.split_at(at);
    let inside = brackets.strip_prefix('[').and_then(|inside| inside.strip_suffix(']'));
    match inside {
        Some(inside) if inside.contains('=') && !inside.contains(['[', ']']) => {
            Ok((core.trim_end(), brackets))
        }
        Some(inside) if !inside.contains('=') => Err(Complaint::invalid(
            format!("`{package}`: conda packages have no extras"),
            "leave out the brackets, or move the line into the list below `- pip:`",
        )),
        _ => Err(Complaint::invalid(
            format!("`{package}`: the brackets are not those of a package"),
            "close them at the end of the line: `- numpy[version='>=1.26']`",
        )),
    }
}

fn leading_name(core: &str) -> &str {
    let end = core.find(|c: char| !c.is_ascii_alphanumeric() && !"_-.".contains(c)).unwrap_or(core.len());
    &core[..end]
}

/// Without the blanks around operators and commas, which change nothing.
fn squeeze(text: &str) -> String {
    let joins = |c: char| OPERATORS.contains(&c) || c == ',' || c == '|';
    let mut squeezed = String::with_capacity(text.len());
    for c in text.chars() {
        if joins(c) {
            squeezed.truncate(squeezed.trim_end().len());
        }
        if c != ' ' || !squeezed.ends_with(joins) {
            squeezed.push(c);
        }
    }
    squeezed
}

/// Refuses what cannot be a version and a build, and remarks on what seldom is.
fn check_version(text: &str, name: &str, rest: &str) -> Result<Option<String>, Complaint> {
    let rest = &without_epochs(rest);
    for run in rest.split(|c| !OPERATORS.contains(&c)).filter(|run| !run.is_empty()) {
        if !KNOWN.contains(&run) {
            let mirrored: String = run.chars().rev().collect();
            let fix = match KNOWN.contains(&mirrored.as_str()) {
                true => format!("write `{mirrored}`"),
                false => USUAL.to_owned(),
            };
            return Err(Complaint::invalid(format!("`{text}`: `{run}` compares nothing"), fix));
        }
    }
    if rest.ends_with(|c| OPERATORS.contains(&c) || c == ',' || c == '|') {
        return Err(Complaint::invalid(format!("`{text}` ends where a version should follow"), USUAL));
    }
    let words: Vec<&str> = rest.split(' ').filter(|word| !word.is_empty()).collect();
    let Some(version) = words.first() else { return Ok(None) };
    // `=1.26=py39_0` holds a build already.
    let room =
        if version.trim_start_matches(OPERATORS).contains('=') && !version.contains(',') { 1 } else { 2 };
    if let Some(extra) = words.get(room) {
        let message =
            format!("`{text}`: `{extra}` is one word too many after the name, the version and the build");
        return Err(Complaint::invalid(message, "write one package on each line, and comments after ` #`"));
    }
    let versionlike = |word: &str| word.contains(|c: char| c.is_ascii_digit() || c == '*');
    if !versionlike(version) && !version.starts_with(OPERATORS) {
        let message = format!("`{text}`: `{version}` is no version");
        return Err(Complaint::invalid(message, "write one package on each line"));
    }
    let remark = match (words.get(1), *version) {
        (Some(build), _) if !versionlike(build) => {
            Some(format!("`{text}`: `{build}` is taken as the build that is wanted"))
        }
        (_, version) if !versionlike(version) => Some(format!("`{text}`: `{version}` is an unusual version")),
        (None, version) if name.eq_ignore_ascii_case("python") && is_two_parts(version) => {
            let version = version.trim_start_matches('=');
            Some(format!("`{text}` is Python {version}.0 alone; `{name}={version}` is any {version}"))
        }
        _ => None,
    };
    Ok(remark)
}

/// `=1!2.0` becomes `=2.0`, as far as versions are recognized here.
fn without_epochs(text: &str) -> String {
    let mut plain = String::with_capacity(text.len());
    for (at, part) in text.split('!').enumerate() {
        let start = plain.trim_end_matches(|c: char| c.is_ascii_digit()).len();
        let begins =
            plain[..start].is_empty() || plain[..start].ends_with([' ', '=', '<', '>', '~', ',', '|', '(']);
        match start < plain.len() && begins && part.starts_with(|c: char| c.is_ascii_alphanumeric()) {
            true => plain.truncate(start),
            false if at > 0 => plain.push('!'),
            false => {}
        }
        plain.push_str(part);
    }
    plain
}

/// `==3.11`
fn is_two_parts(version: &str) -> bool {
    let parts = version.strip_prefix("==").map(|version| version.split('.').collect::<Vec<_>>());
    let number = |part: &&str| !part.is_empty() && part.chars().all(|c| c.is_ascii_digit());
    parts.is_some_and(|parts| parts.len() == 2 && parts.iter().all(number))
}

/// Refuses what cannot be a channel.
pub(super) fn check_channel(text: &str) -> Result<(), Complaint> {
    if text.contains("://") {
        return check_address(text);
    }
    if text.is_empty() {
        return Err(Complaint::invalid("`channels` has an entry that says nothing", "remove the line"));
    }
    check_characters(text)?;
    if text.starts_with(['.', '/', '~']) || text.contains(':') || climbs(text) || text == "local" {
        return Err(Complaint::unsupported(
            format!("the channel `{text}` is a folder of your machine, which the node does not have"),
            "if every node has the folder, write `file:///` and its whole path",
        ));
    }
    Ok(())
}

/// Refuses what cannot be the address of a channel or a package.
pub(super) fn check_address(text: &str) -> Result<(), Complaint> {
    if holds_credentials(text) {
        let message = "an address holds credentials, which would be stored with the job";
        return Err(Complaint::invalid(message, CREDENTIALS));
    }
    check_characters(text)?;
    let (scheme, rest) = text.split_once("://").unwrap_or(("", text));
    match scheme {
        "http" | "https" | "file" if !rest.is_empty() && !climbs(rest) => Ok(()),
        "http" | "https" | "file" => Err(Complaint::invalid(
            format!("`{text}` is no whole address"),
            "write all of it, for example `https://host/channel`",
        )),
        _ => Err(Complaint::unsupported(
            format!("nothing is fetched from `{scheme}://`"),
            "use an address of `https://` or, for a folder of the node, `file:///`",
        )),
    }
}

fn check_characters(text: &str) -> Result<(), Complaint> {
    let odd = |c: &char| !c.is_ascii_alphanumeric() && !"_-.+/:%~!=".contains(*c);
    let Some(odd) = text.chars().find(odd) else { return Ok(()) };
    let shown: String = odd.escape_debug().collect();
    Err(Complaint::invalid(
        format!("`{shown}` cannot stand in the name or the address of a channel"),
        "write a name such as `conda-forge`, or an address such as `https://host/channel`",
    ))
}

fn climbs(path: &str) -> bool {
    path.split('/').any(|part| part == "..")
}

/// The channel that a tidy specification names.
pub(super) fn channel(tidy: &str) -> Option<&str> {
    tidy.rsplit_once("::").map(|(channel, _)| channel)
}

/// The name of the package of a tidy specification, in small letters.
pub(super) fn name(tidy: &str) -> String {
    let package = tidy.rsplit_once("::").map_or(tidy, |(_, package)| package);
    leading_name(package).to_ascii_lowercase()
}

/// Whether a tidy specification certainly asks for another version: it has a plain one, `=1.2` or `==1.2`.
pub(super) fn excludes(tidy: &str, version: &str) -> bool {
    let package = tidy.rsplit_once("::").map_or(tidy, |(_, package)| package);
    let wanted = package[leading_name(package).len()..].trim_start_matches('=').trim_end_matches(".*");
    let plain = wanted.starts_with(|c: char| c.is_ascii_digit())
        && wanted.chars().all(|c| c.is_ascii_digit() || c == '.');
    let begins = |long: &str, short: &str| {
        long.strip_prefix(short).is_some_and(|rest| rest.is_empty() || rest.starts_with('.'))
    };
    plain && !begins(version, wanted) && !begins(wanted, version)
}

/// A tidy specification with its name in small letters, as conda compares names.
pub(super) fn normalized(tidy: &str) -> String {
    let (channel, package) = match tidy.rsplit_once("::") {
        Some((channel, package)) => (format!("{channel}::"), package),
        None => (String::new(), tidy),
    };
    let name = leading_name(package);
    format!("{channel}{}{}", name.to_ascii_lowercase(), &package[name.len()..])
}
