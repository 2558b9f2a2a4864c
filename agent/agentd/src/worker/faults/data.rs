//! What kept data from a job that named it by its address.

use agent_model::{Code, DataInput, Fault};
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
        SupplyError::Stores(StoresError::Unknown { file, .. }) => fault(Code::DataUnknown).fix(format!(
            "name one of these, or let the operator add the store to {} on the node, under `datastores`",
            file.display()
        )),
        SupplyError::Stores(StoresError::UnknownName { file, .. }) => fault(Code::DataUnknown).fix(format!(
            "write the address itself, or let the operator add the name to {} on the node, under `data_map`",
            file.display()
        )),
        SupplyError::Stores(StoresError::Open { file }) => {
            fault(Code::DataNode).fix(format!("on the node: `chmod 640 {}`", file.display()))
        }
        SupplyError::Stores(_) => fault(Code::DataNode)
            .fix("let the operator correct the file that `data_stores` names in the node's configuration"),
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
        SupplyError::Fetch(E::ProgramMissing { .. }) => fault(Code::DataNode)
            .fix("install `agent-env` beside `agentd` on the node; `agentctl doctor` says whether it is there"),
        SupplyError::Fetch(E::Unreachable(_) | E::NoRoom(_)) => fault(Code::DataUnreachable)
            .fix("check the node's network and proxy variables, or name a mirror under `data_map` on the node"),
        SupplyError::Fetch(E::File { .. } | E::Failed(_)) => {
            fault(Code::DataNode).fix("look at the log of agentd on the node")
        }
    }
}

#[cfg(test)]
mod tests {
    use agent_model::{Blame, Retry};

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

    use DataError as E;
}
