//! What kept data from a job that named it by its address, and outputs from the store that the job named.

use agent_model::{Code, DataInput, DataUri, Fault, Retry};
use agent_runtime::data::DataError;

use super::super::data::SupplyError;
use super::super::data::stores::StoresError;

/// The fault for the data of one input.
pub(crate) fn data(name: &str, input: &DataInput, error: &SupplyError) -> Fault {
    use DataError as E;
    let what = format!("there is no data for `inputs.{name}`: {}", input.uri);
    let fault = |code| Fault::new(code, what.clone()).because(error);
    match error {
        _ if error.is_no_room() => fault(Code::DiskFull)
            .fix("free space on the node's disk; `agentctl doctor` shows how much there is"),
        SupplyError::Stores(StoresError::UnknownName { file, .. }) => fault(Code::DataUnknown).fix(format!(
            "write the address itself, or let the operator add the name to {} on the node, under `data_map`",
            file.display()
        )),
        SupplyError::Stores(error) => of_stores(fault, error),
        SupplyError::Nothing { .. } => fault(Code::DataAbsent)
            .fix("correct the path, or let the operator look whether the store is mounted on the node"),
        SupplyError::OtherKind { is_file: true, .. } => {
            fault(Code::DataAbsent).fix("write `type: uri_file`, or name a folder")
        }
        SupplyError::OtherKind { is_file: false, .. } => {
            fault(Code::DataAbsent).fix("write `type: uri_folder`, or name a file in it")
        }
        SupplyError::Fetch(E::Absent(_)) => fault(Code::DataAbsent).fix("correct the address"),
        SupplyError::Fetch(E::Denied(_)) => fault(Code::DataDenied).fix(
            "let the operator put credentials into the file that `data_stores` names in the node's configuration: a \
             store under `datastores` with this `url`",
        ),
        SupplyError::Fetch(E::Refused(_)) => fault(Code::DataRefused).fix(
            "correct the address or the type of the input; if it is the store's settings, the operator finds them in \
             the file that `data_stores` names",
        ),
        SupplyError::Fetch(E::Damaged(_)) => {
            fault(Code::DataDamaged).fix("submit it again; if it stays so, look at the server")
        }
        SupplyError::Fetch(E::ProgramMissing { .. }) => fault(Code::DataNode).fix(INSTALL),
        SupplyError::Fetch(E::Unreachable(_) | E::NoRoom(_)) => fault(Code::DataUnreachable)
            .fix("check the node's network and proxy variables, or name a mirror under `data_map` on the node"),
        SupplyError::Fetch(E::File { .. } | E::Failed(_)) => {
            fault(Code::DataNode).fix("look at the log of agentd on the node")
        }
    }
}

/// The fault for what the file of data stores says, or does not say, of inputs and outputs alike.
fn of_stores(fault: impl Fn(Code) -> Fault, error: &StoresError) -> Fault {
    match error {
        StoresError::Unknown { file, .. } => fault(Code::DataUnknown).fix(format!(
            "name one of these, or let the operator add the store to {} on the node, under `datastores`",
            file.display()
        )),
        StoresError::Open { file } => {
            fault(Code::DataNode).fix(format!("on the node: `chmod 640 {}`", file.display()))
        }
        _ => fault(Code::DataNode)
            .fix("let the operator correct the file that `data_stores` names in the node's configuration"),
    }
}

/// What to do where the program that fetches and sends is missing.
const INSTALL: &str =
    "install `agent-env` beside `agentd` on the node; `agentctl doctor` says whether it is there";

/// Why an output is not in the data store that the job names.
#[derive(Debug)]
pub(crate) enum Unsent {
    /// The job was canceled while it was sent.
    Canceled,
    /// The machine will be taken away, so nothing is waited for.
    Leaving,
    /// It cannot be sent.
    Failed(SupplyError),
}

/// The fault for an output that is not, or would not get, at its address.
pub(crate) fn unsent(name: &str, uri: &DataUri, unsent: &Unsent) -> Fault {
    use DataError as E;
    let fault = |code| Fault::new(code, format!("`outputs.{name}` was not sent to {uri}"));
    let error = match unsent {
        Unsent::Canceled => {
            return fault(Code::OutputUnsent).why("the job was canceled meanwhile").fix(LATER);
        }
        Unsent::Leaving => {
            let fault = fault(Code::OutputUnsent).why("the machine is taken away before that").fix(LATER);
            return fault.with_retry(Retry::OtherNode);
        }
        Unsent::Failed(error) => error,
    };
    let because = |code| fault(code).because(error);
    match error {
        SupplyError::Stores(StoresError::ReadOnly { file, .. } | StoresError::NoStore { file, .. }) => {
            because(Code::OutputRefused).fix(format!(
                "name a store that takes outputs, or let the operator write `writable: true` to the store in {} on the \
                 node; without `path`, `agentctl download` fetches the output",
                file.display()
            ))
        }
        SupplyError::Stores(error) => of_stores(because, error),
        SupplyError::Fetch(E::ProgramMissing { .. }) => because(Code::DataNode).fix(INSTALL),
        SupplyError::Fetch(E::Denied(_)) => because(Code::OutputUnsent).fix(format!(
            "let the operator give the node credentials that may write there, in the file that `data_stores` names; {LATER}"
        )),
        _ => because(Code::OutputUnsent).fix(LATER),
    }
}

/// What to do with an output that is not where it is to be.
const LATER: &str =
    "the output is not lost: `agentctl download` fetches it; put it there by hand, or run the job again";

#[cfg(test)]
mod tests {
    use agent_model::Blame;

    use super::*;

    #[test]
    fn test_whose_fault_it_is_and_what_to_do() {
        let uri = "https://h.example/a.csv".parse().unwrap();
        let input = DataInput { uri, is_file: true, is_own_copy: false };
        let said = || "h.example answered".to_owned();
        let (missing, looked) = (StoresError::Open { file: "/etc/x".into() }, "/opt/agent-env".into());
        for (error, code, blame) in [
            (E::Absent(said()).into(), Code::DataAbsent, Blame::User),
            (E::Denied(said()).into(), Code::DataDenied, Blame::User),
            (E::Refused(said()).into(), Code::DataRefused, Blame::User),
            (E::Damaged(said()).into(), Code::DataDamaged, Blame::Network),
            (E::Unreachable(said()).into(), Code::DataUnreachable, Blame::Network),
            (E::NoRoom(said()).into(), Code::DiskFull, Blame::Node),
            (E::ProgramMissing { looked }.into(), Code::DataNode, Blame::Node),
            (SupplyError::from(missing), Code::DataNode, Blame::Node),
        ] {
            let fault = data("iris", &input, &error);
            assert_eq!((fault.code, fault.blame), (code, blame), "{error}");
            assert!(fault.what.contains("`inputs.iris`") && fault.fix.is_some());
            assert_eq!(fault.retry == Retry::Never, blame == Blame::User, "{error}");
        }
    }

    #[test]
    fn test_an_output_that_is_not_sent_is_not_lost() {
        let uri = "azureml://datastores/share/paths/a".parse().unwrap();
        let (said, file) = (|| "the store said so".to_owned(), || "/etc/x".into());
        let read_only = StoresError::ReadOnly { name: "share".into(), file: file() };
        let unknown = StoresError::Unknown { name: "share".into(), known: Vec::new(), file: file() };
        for (why, code, fix) in [
            (Unsent::Canceled, Code::OutputUnsent, "agentctl download"),
            (Unsent::Failed(E::Denied(said()).into()), Code::OutputUnsent, "credentials"),
            (Unsent::Failed(E::Unreachable(said()).into()), Code::OutputUnsent, "agentctl download"),
            (Unsent::Failed(read_only.into()), Code::OutputRefused, "writable: true"),
            (Unsent::Failed(unknown.into()), Code::DataUnknown, "datastores"),
        ] {
            let fault = unsent("model", &uri, &why);
            assert_eq!(fault.code, code, "{why:?}");
            assert!(
                fault.what.contains("`outputs.model`") && fault.what.contains("paths/a"),
                "{}",
                fault.what
            );
            assert!(fault.fix.as_ref().is_some_and(|text| text.contains(fix)), "{:?}", fault.fix);
        }
    }

    use DataError as E;
}
