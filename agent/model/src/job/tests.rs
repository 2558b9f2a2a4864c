use std::time::Duration;

use proptest::prelude::*;

use super::*;

fn draft(command: &str) -> JobDraft {
    JobDraft { command: command.to_owned(), ..JobDraft::default() }
}

fn refused(draft: JobDraft) -> Fault {
    let fault = draft.validate().expect_err("an invalid job was accepted");
    assert_eq!(fault.code, Code::JobInvalid);
    assert!(fault.fix.is_some(), "{fault} does not say what to do");
    fault
}

#[test]
fn test_defaults_are_filled_in() {
    let spec = draft("python train.py --lr 0.1").validate().unwrap();
    assert_eq!(spec.display_name, "python train.py");
    assert_eq!(spec.experiment, "Default");
    assert_eq!((spec.resources.nodes, spec.retry.max_attempts), (1, 1));
    assert_eq!(spec.environment, EnvSpec::host());
    let named = JobDraft { name: Some("x-1".parse().unwrap()), ..draft("true") };
    assert_eq!(named.validate().unwrap().display_name, "x-1");
}

#[test]
fn test_a_title_of_words_has_no_half_of_a_quoted_text() {
    for (command, title) in [("echo \"hello world\"", "echo hello"), ("'a b' c", "a b"), ("''", "''")] {
        assert_eq!(draft(command).validate().unwrap().display_name, title);
    }
}

#[test]
fn test_command_that_no_shell_can_run_is_refused() {
    for command in ["", " \n\t", "a\0b", &"x".repeat(MAX_COMMAND + 1)] {
        refused(draft(command));
    }
    assert!(draft(&"x".repeat(MAX_COMMAND)).validate().is_ok());
}

#[test]
fn test_references_must_be_defined() {
    let fault = refused(draft("t ${{inputs.data}}"));
    assert!(fault.what.contains("${{inputs.data}}"), "{fault}");
    assert_eq!(fault.why, ["defined `inputs`: none"]);
    refused(draft("t ${{outputs.m}}"));
    refused(draft("t ${{secrets.m}}"));
    let mut good = draft("t ${{inputs.data}} ${{outputs.m}}");
    good.inputs.insert("data".into(), Input::Literal("1".into()));
    good.outputs.insert("m".into(), Output::Folder);
    good.validate().unwrap();
}

#[test]
fn test_names_that_would_not_survive_are_refused() {
    for name in ["", "A=B", "A\0"] {
        let mut bad = draft("true");
        bad.environment_variables.insert(name.into(), "1".into());
        refused(bad);
    }
    for name in ["", ".", "..", ".x", "a/b", "a b", "a\n", &"x".repeat(201)] {
        let mut bad = draft("true");
        bad.inputs.insert(name.into(), Input::Folder(Digest::EMPTY));
        refused(bad);
        let mut bad = draft("true");
        bad.outputs.insert(name.into(), Output::File);
        refused(bad);
    }
    let mut good = draft("true");
    good.inputs.insert("données-1.x_y".into(), Input::Literal("1".into()));
    good.validate().unwrap();
}

#[test]
fn test_resources_and_limits_of_nothing_are_refused() {
    let mut bad = draft("true");
    bad.resources.nodes = 0;
    refused(bad);
    let mut bad = draft("true");
    bad.limits.timeout = Some(Duration::ZERO);
    refused(bad);
}

#[test]
fn test_grace_has_a_default() {
    assert_eq!(Limits::default().grace(), Limits::DEFAULT_GRACE);
    let none = Limits { grace: Some(Duration::ZERO), ..Limits::default() };
    assert_eq!(none.grace(), Duration::ZERO);
}

#[test]
fn test_backoff_doubles_up_to_an_hour() {
    let policy = RetryPolicy { max_attempts: 9, backoff: Duration::from_secs(10) };
    let waits: Vec<u64> = (2..13).map(|attempt| policy.wait_before(attempt).as_secs()).collect();
    assert_eq!(waits, [10, 20, 40, 80, 160, 320, 640, 1280, 2560, 3600, 3600]);
    assert_eq!(policy.wait_before(u32::MAX), Duration::from_secs(3600));
    assert_eq!(policy.wait_before(0), Duration::from_secs(10));
}

#[test]
fn test_priority_words_round_trip_and_order() {
    for priority in [Priority::Low, Priority::Medium, Priority::High] {
        assert_eq!(Priority::parse(&priority.name().to_uppercase()), Some(priority));
    }
    assert_eq!(Priority::parse("urgent"), None);
    assert!(Priority::High > Priority::Medium && Priority::Medium > Priority::Low);
}

#[test]
fn test_stored_job_is_validated_when_read_back() {
    let json = serde_json::to_string(&draft("true").validate().unwrap()).unwrap();
    assert!(serde_json::from_str::<JobSpec>(&json).is_ok());
    let broken = json.replace("\"command\":\"true\"", "\"command\":\"\"");
    assert_ne!(broken, json);
    assert!(serde_json::from_str::<JobSpec>(&broken).is_err());
    let later = json.replacen('{', "{\"from_a_later_version\":1,", 1);
    assert!(serde_json::from_str::<JobSpec>(&later).is_ok(), "an unknown field must be read over");
}

proptest! {
    #[test]
    fn test_validation_is_stable(command in ".{0,80}", title in ".{0,20}", attempts in 0_u32..5) {
        let draft = JobDraft {
            display_name: title,
            retry: RetryPolicy { max_attempts: attempts, ..RetryPolicy::default() },
            ..draft(&command)
        };
        if let Ok(spec) = draft.validate() {
            prop_assert!(!spec.display_name.is_empty() && spec.retry.max_attempts > 0);
            let again = JobDraft::from(spec.clone()).validate().unwrap();
            prop_assert_eq!(again, spec);
        }
    }
}

#[test]
fn test_secrets_are_named_by_variables_that_nothing_else_sets() {
    let job = |variable: &str, name: &str| JobDraft {
        command: "true".into(),
        environment_variables: [("TOKEN".to_owned(), "x".to_owned())].into(),
        secrets: [(variable.to_owned(), name.to_owned())].into(),
        ..JobDraft::default()
    };
    let spec = job("KEY", "wandb").validate().unwrap();
    for (variable, name) in
        [("TOKEN", "wandb"), ("", "wandb"), ("A=B", "wandb"), ("KEY", "../x"), ("KEY", "")]
    {
        assert_eq!(job(variable, name).validate().unwrap_err().code, Code::JobInvalid, "{variable}: {name}");
    }
    let owner = Some(crate::Principal::Local { uid: 7 });
    let owned = spec.clone().owned_by(owner.clone(), None);
    assert_eq!((&owned.owner, &owned.secrets), (&owner, &spec.secrets));
    let text = serde_json::to_string(&owned).unwrap();
    assert_eq!(serde_json::from_str::<JobSpec>(&text).unwrap(), owned);
    let former = text.replace("\"owner\":\"uid 7\"", "\"x\":1");
    assert_eq!(serde_json::from_str::<JobSpec>(&former).unwrap(), spec, "of a release that knew no owner");
}
