//! What was asked for with a job, as JSON.

use std::collections::BTreeMap;

use agent_model::job::Input;
use serde_json::{Value, json};

use super::JobView;

impl JobView {
    /// What was asked for, as JSON.
    pub(crate) fn spec_json(&self) -> Value {
        let spec = &self.spec;
        let inputs: BTreeMap<_, _> =
            spec.inputs.iter().map(|(name, input)| (name, input_json(input))).collect();
        let outputs: BTreeMap<_, _> = spec
            .outputs
            .iter()
            .map(|(name, output)| (name, if output.is_file() { "uri_file" } else { "uri_folder" }))
            .collect();
        json!({
            "description": spec.description,
            "tags": spec.tags,
            "command": spec.command,
            "code": spec.code.map(|digest| digest.to_string()),
            "environment": spec.environment,
            "environment_variables": spec.environment_variables,
            "inputs": inputs,
            "outputs": outputs,
            "sent_to": self.sent_to().collect::<BTreeMap<_, _>>(),
            "compute": spec.compute,
            "resources": {
                "nodes": spec.resources.nodes,
                "gpus": spec.resources.gpus,
                "memory_bytes": spec.resources.memory,
                "cpus": spec.resources.cpus,
                "labels": spec.resources.labels,
                "shm_bytes": spec.resources.shm,
            },
            "distribution": spec.distribution,
            "predecessors": spec.predecessors,
            "array": spec.array,
            "sweep": spec.sweep,
            "pipeline": spec.pipeline,
            "resume": if spec.resume_outputs { "outputs" } else { "never" },
            "resumes": spec.resumes,
            "success_exit_codes": spec.success_exit_codes,
            "limits": {
                "timeout_s": spec.limits.timeout.map(|t| t.as_secs_f64()),
                "grace_s": spec.limits.grace().as_secs_f64(),
            },
            "retry": { "max_attempts": spec.retry.max_attempts, "backoff_s": spec.retry.backoff.as_secs_f64() },
        })
    }
}

fn input_json(input: &Input) -> Value {
    match input {
        Input::Literal(text) => json!({ "value": text }),
        Input::Folder(root) => json!({ "folder": root.to_string() }),
        Input::File { root, name } => json!({ "file": name, "root": root.to_string() }),
        Input::Data(data) => json!({ "uri": data.uri.to_string(), "is_file": data.is_file }),
    }
}
