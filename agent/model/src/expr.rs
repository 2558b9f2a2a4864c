//! The expressions of a command: `${{inputs.NAME}}`, `${{outputs.NAME}}`, and in a trial `${{search_space.NAME}}`.
//!
//! Blanks inside the braces are allowed. Anything else between `${{` and `}}` is refused rather than left
//! in the command, where a shell would interpret it in unexpected ways.
//!
//! `$[[--lr ${{inputs.lr}}]]` is a part that is there only when the inputs in it have values: [`optional`].

use std::fmt;

use crate::fault::{Code, Fault};

/// What an expression names.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Reference {
    /// `${{inputs.NAME}}`
    Input(String),
    /// `${{outputs.NAME}}`
    Output(String),
    /// `${{search_space.NAME}}`, of the trials of a sweep.
    Drawn(String),
}

/// As it is written in a command.
impl fmt::Display for Reference {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (kind, name) = match self {
            Reference::Input(name) => ("inputs", name),
            Reference::Output(name) => ("outputs", name),
            Reference::Drawn(name) => ("search_space", name),
        };
        write!(f, "${{{{{kind}.{name}}}}}")
    }
}

/// A command cut into text and references.
enum Piece<'a> {
    Text(&'a str),
    Reference(Reference),
}

/// Every reference of a command, in order.
pub fn references(command: &str) -> Result<Vec<Reference>, Fault> {
    Ok(pieces(command)?
        .into_iter()
        .filter_map(|piece| match piece {
            Piece::Reference(reference) => Some(reference),
            Piece::Text(_) => None,
        })
        .collect())
}

/// The command with every reference replaced by what `resolve` returns for it.
pub fn substitute(command: &str, resolve: impl Fn(&Reference) -> String) -> Result<String, Fault> {
    Ok(pieces(command)?
        .into_iter()
        .map(|piece| match piece {
            Piece::Text(text) => text.to_owned(),
            Piece::Reference(reference) => resolve(&reference),
        })
        .collect())
}

/// The command with its optional parts: each stays, without its brackets, if all that it names `is_there`, and goes if
/// something is not; it stays as it is where that is not known yet. Brackets that name nothing are the shell's.
pub fn optional(command: &str, is_there: impl Fn(&Reference) -> Option<bool>) -> String {
    let (mut whole, mut rest) = (String::with_capacity(command.len()), command);
    while let Some(start) = rest.find("$[[") {
        let inside = &rest[start + 3..];
        let Some(end) = inside.find("]]") else { break };
        let named = references(&inside[..end]).unwrap_or_default();
        whole.push_str(&rest[..start]);
        match named.as_slice() {
            named if named.iter().any(|one| is_there(one) == Some(false)) => {}
            [_, ..] if named.iter().all(|one| is_there(one) == Some(true)) => whole.push_str(&inside[..end]),
            _ => whole.push_str(&rest[start..start + 3 + end + 2]),
        }
        rest = &inside[end + 2..];
    }
    whole + rest
}

fn pieces(command: &str) -> Result<Vec<Piece<'_>>, Fault> {
    let mut found = Vec::new();
    let mut rest = command;
    while let Some(start) = rest.find("${{") {
        let inside = &rest[start + 3..];
        let Some(end) = inside.find("}}") else {
            return Err(Fault::new(Code::JobInvalid, "the command has `${{` without `}}`")
                .fix("close the expression, for example `${{inputs.data}}`"));
        };
        found.push(Piece::Text(&rest[..start]));
        found.push(Piece::Reference(parse(inside[..end].trim())?));
        rest = &inside[end + 2..];
    }
    found.push(Piece::Text(rest));
    Ok(found)
}

fn parse(expression: &str) -> Result<Reference, Fault> {
    let valid = |name: &str| {
        !name.is_empty() && name.chars().all(|c| c.is_alphanumeric() || matches!(c, '_' | '-' | '.'))
    };
    match expression.split_once('.') {
        Some(("inputs", name)) if valid(name) => Ok(Reference::Input(name.to_owned())),
        Some(("outputs", name)) if valid(name) => Ok(Reference::Output(name.to_owned())),
        Some(("search_space", name)) if valid(name) => Ok(Reference::Drawn(name.to_owned())),
        _ => Err(Fault::new(
            Code::JobInvalid,
            format!("the command uses `${{{{{expression}}}}}`, which a command job does not have"),
        )
        .fix("only `${{inputs.NAME}}` and `${{outputs.NAME}}` may stand in a command, and `${{search_space.NAME}}` in that of a sweep's trial")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn test_substitute_replaces_every_reference() {
        let text = "a ${{inputs.x}} b ${{ outputs.model-1.y }} $HOME ${{inputs.x}}";
        let replaced = substitute(text, |r| match r {
            Reference::Input(name) => format!("<{name}>"),
            Reference::Output(name) => format!("[{name}]"),
            Reference::Drawn(name) => name.clone(),
        });
        assert_eq!(replaced.unwrap(), "a <x> b [model-1.y] $HOME <x>");
    }

    #[test]
    fn test_optional_parts_stay_with_what_they_name() {
        let there = |reference: &Reference| match reference {
            Reference::Input(name) => Some(name == "lr"),
            _ => None,
        };
        for (command, becomes) in [
            ("t $[[--lr ${{inputs.lr}}]] x", "t --lr ${{inputs.lr}} x"),
            ("t $[[--n ${{inputs.n}}]] x", "t  x"),
            ("$[[${{inputs.lr}} ${{ inputs.n }}]]$[[${{inputs.lr}}]]", "${{inputs.lr}}"),
            ("a $[[1]] $[[ -f b ]] $[[", "a $[[1]] $[[ -f b ]] $[["),
            ("[[ -f ${{inputs.n}} ]]", "[[ -f ${{inputs.n}} ]]"),
            ("$[[${{search_space.a}} ${{inputs.lr}}]]", "$[[${{search_space.a}} ${{inputs.lr}}]]"),
            ("$[[${{search_space.a}} ${{inputs.n}}]]", ""),
        ] {
            assert_eq!(optional(command, there), becomes, "{command}");
        }
    }

    #[test]
    fn test_unknown_and_open_expressions_are_refused() {
        for bad in ["${{inputs.x", "${{search.lr}}", "${{inputs.}}", "${{}}", "${{inputs.a b}}"] {
            assert_eq!(references(bad).unwrap_err().code, Code::JobInvalid, "{bad}");
        }
    }
}
