//! What nodes and clients of the release before say is understood: every field, value and call that it had is there
//! with its number, name and type, or its number is reserved.
//!
//! `AGENT_UPDATE_FIXTURES=1 cargo test --workspace --test repo wire` records the present messages, for the next release.

use std::collections::BTreeSet;

use prost_types::field_descriptor_proto::Label;
use prost_types::{DescriptorProto, EnumDescriptorProto, FileDescriptorProto};

use crate::{files_below, none, root};

/// The messages of the release before: a line each, what it is about before the ` = `.
const BEFORE: &str = "tests/upgrade/fixtures/wire.txt";

/// Calls that were withdrawn, each by a record in `agent/docs/adr` that says what whoever makes them is told.
const WITHDRAWN: &[&str] = &[".agent.v1.Worker/MoveJobs"]; // 74

/// What may be on the wire.
#[derive(Debug, Default)]
struct Wire {
    lines: BTreeSet<String>,
    /// Types there are.
    types: BTreeSet<String>,
    /// What no field and no value may have any more.
    reserved: BTreeSet<String>,
}

impl Wire {
    fn add_file(&mut self, file: &FileDescriptorProto) {
        let package = format!(".{}", file.package());
        file.message_type.iter().for_each(|message| self.add_message(&package, message));
        file.enum_type.iter().for_each(|one| self.add_enum(&package, one));
        for service in &file.service {
            for call in &service.method {
                let stream = |is: bool| if is { "stream " } else { "" };
                let (asks, answers) = (stream(call.client_streaming()), stream(call.server_streaming()));
                let (from, to) = (call.input_type(), call.output_type());
                let call = format!("{package}.{}/{}", service.name(), call.name());
                self.lines.insert(format!("{call} = {asks}{from} -> {answers}{to}"));
            }
        }
    }

    fn add_message(&mut self, within: &str, message: &DescriptorProto) {
        let of = format!("{within}.{}", message.name());
        for field in &message.field {
            let repeated = if field.label() == Label::Repeated { "repeated " } else { "" };
            let kind = match field.type_name() {
                "" => field.r#type().as_str_name().trim_start_matches("TYPE_").to_lowercase(),
                name => name.to_owned(),
            };
            self.lines.insert(format!("{of} {} = {repeated}{kind} {}", field.number(), field.name()));
        }
        let reserved = message.reserved_range.iter().flat_map(|range| range.start()..range.end());
        self.reserved.extend(reserved.map(|number| format!("{of} {number}")));
        message.nested_type.iter().for_each(|nested| self.add_message(&of, nested));
        message.enum_type.iter().for_each(|nested| self.add_enum(&of, nested));
        self.types.insert(of);
    }

    fn add_enum(&mut self, within: &str, one: &EnumDescriptorProto) {
        let of = format!("{within}.{}", one.name());
        let values = one.value.iter().map(|value| format!("{of} {} = {}", value.number(), value.name()));
        self.lines.extend(values);
        // Ranges of values have their end in them, those of fields have not.
        let reserved = one.reserved_range.iter().flat_map(|range| range.start()..=range.end());
        self.reserved.extend(reserved.map(|number| format!("{of} {number}")));
        self.types.insert(of);
    }

    /// What of the release before is not understood any more. A type that is gone is missed where it was used.
    fn lacks(&self, before: &str) -> Vec<String> {
        let is_gone = |line: &&str| {
            let (what, _) = line.split_once(" = ").unwrap();
            let of = what.split(' ').next().unwrap();
            let is_used = of.contains('/') && !WITHDRAWN.contains(&of) || self.types.contains(of);
            !self.lines.contains(*line) && !self.reserved.contains(what) && is_used
        };
        before.lines().filter(is_gone).map(|line| format!("`{line}` is gone: reserve its number")).collect()
    }
}

fn now() -> Wire {
    let protos = files_below("proto/agent", &[".proto"]);
    let protos = protos.iter().map(|path| path.strip_prefix("proto").unwrap());
    let mut wire = Wire::default();
    let files = protox::compile(protos, [root().join("proto")]).unwrap().file;
    files.iter().filter(|file| file.package().starts_with("agent.")).for_each(|file| wire.add_file(file));
    wire
}

#[test]
#[allow(clippy::disallowed_methods, reason = "a switch for whoever makes a release")]
fn test_messages_of_the_release_before_are_understood() {
    let (wire, before) = (now(), root().join(BEFORE));
    if std::env::var_os("AGENT_UPDATE_FIXTURES").is_some() {
        let lines: Vec<_> = wire.lines.iter().map(|line| format!("{line}\n")).collect();
        std::fs::write(&before, lines.concat()).unwrap();
    }
    let before = std::fs::read_to_string(before).unwrap();
    assert!(before.lines().count() > 500, "the messages are found");
    none("messages of the release before", wire.lacks(&before));
}

#[test]
fn test_what_is_taken_from_the_wire_is_noticed() {
    let wire = now();
    let has = |kind: &str| wire.lines.iter().find(|line| line.contains(kind)).unwrap().clone();
    let (field, call) = (has(" string "), has(" -> "));
    assert!(wire.lacks(&format!("{field}\n{call}")).is_empty());
    for changed in [field.replace(" string ", " bytes "), call.replace(" -> ", " -> stream stream ")] {
        assert_eq!(wire.lacks(&changed).len(), 1, "{changed}");
    }
    let (what, _) = field.split_once(" = ").unwrap();
    let mut reserved = now();
    reserved.reserved.insert(what.to_owned());
    assert!(reserved.lacks(&format!("{what} = bytes other")).is_empty());
}
