use proptest::prelude::*;

use super::*;

use Before as B;
use JobEvent as E;
use JobState as S;
use Verdict as V;

const VERDICTS: [V; 3] = [V::Completed, V::Failed, V::Canceled];

fn job_states() -> Vec<S> {
    let mut states = vec![S::Queued, S::Preparing, S::Running, S::Completed, S::Failed, S::Canceled];
    states.extend([S::NotResponding(B::Preparing), S::NotResponding(B::Running)]);
    for verdict in VERDICTS {
        states.extend([S::Finalizing(verdict), S::NotResponding(B::Finalizing(verdict))]);
    }
    states
}

const JOB_EVENTS: [E; 14] = [
    E::Placed,
    E::NeverDue,
    E::CancelRequested,
    E::AllRunning,
    E::AllSucceeded,
    E::ReplicaFailed { retry: true },
    E::ReplicaFailed { retry: false },
    E::ReplicaCanceled,
    E::LeaseExpired,
    E::SeenAgain,
    E::GraceOver { retry: true },
    E::GraceOver { retry: false },
    E::OutputsStored,
    E::OutputsLost,
];

/// Every row of the table of job states; what is not in it must not change a state.
fn job_table() -> Vec<(S, E, S)> {
    let mut table = vec![(S::Queued, E::Placed, S::Preparing), (S::Queued, E::CancelRequested, S::Canceled)];
    table.push((S::Queued, E::NeverDue, S::Failed));
    table.push((S::Preparing, E::AllRunning, S::Running));
    for (state, before) in [(S::Preparing, B::Preparing), (S::Running, B::Running)] {
        table.extend([
            (state, E::ReplicaFailed { retry: true }, S::Queued),
            (state, E::ReplicaFailed { retry: false }, S::Finalizing(V::Failed)),
            (state, E::AllSucceeded, S::Finalizing(V::Completed)),
            (state, E::CancelRequested, S::Finalizing(V::Canceled)),
            (state, E::ReplicaCanceled, S::Finalizing(V::Canceled)),
            (state, E::LeaseExpired, S::NotResponding(before)),
            (S::NotResponding(before), E::SeenAgain, state),
            (S::NotResponding(before), E::CancelRequested, S::NotResponding(B::Finalizing(V::Canceled))),
        ]);
    }
    for verdict in VERDICTS {
        let silent = S::NotResponding(B::Finalizing(verdict));
        table.extend([
            (S::Finalizing(verdict), E::LeaseExpired, silent),
            (silent, E::SeenAgain, S::Finalizing(verdict)),
            (S::Finalizing(verdict), E::OutputsStored, verdict.into()),
            (
                S::Finalizing(verdict),
                E::OutputsLost,
                if verdict == V::Canceled { S::Canceled } else { S::Failed },
            ),
        ]);
    }
    for before in [B::Preparing, B::Running, B::Finalizing(V::Completed), B::Finalizing(V::Failed)] {
        table.push((S::NotResponding(before), E::GraceOver { retry: true }, S::Queued));
        table.push((S::NotResponding(before), E::GraceOver { retry: false }, S::Failed));
    }
    for retry in [true, false] {
        // A requested end is granted, also when the node never came back.
        let canceled = S::NotResponding(B::Finalizing(V::Canceled));
        table.push((canceled, E::GraceOver { retry }, S::Canceled));
    }
    table
}

#[test]
fn test_job_follows_its_table_and_nothing_else() {
    let table = job_table();
    for state in job_states() {
        for event in JOB_EVENTS {
            let row = table.iter().find(|(from, on, _)| (*from, *on) == (state, event));
            assert_eq!(state.after(event), row.map(|(_, _, to)| *to), "{state:?} on {event:?}");
        }
    }
}

fn job_event() -> impl Strategy<Value = E> {
    prop::sample::select(JOB_EVENTS.to_vec())
}

/// The verdict a state carries, if it is fixed.
fn verdict(state: S) -> Option<V> {
    match state {
        S::Finalizing(verdict) | S::NotResponding(B::Finalizing(verdict)) => Some(verdict),
        S::Completed => Some(V::Completed),
        S::Failed => Some(V::Failed),
        S::Canceled => Some(V::Canceled),
        _ => None,
    }
}

proptest! {
    #[test]
    fn test_job_keeps_its_promises(events in prop::collection::vec(job_event(), 0..60)) {
        let mut state = S::Queued;
        for event in events {
            let Some(next) = state.after(event) else { continue };
            prop_assert!(!state.is_terminal(), "{state:?} changed to {next:?} on {event:?}");
            prop_assert_ne!(next, state);
            if let Some(fixed) = verdict(state) {
                let lost = matches!(event, E::OutputsLost | E::GraceOver { .. });
                prop_assert!(
                    verdict(next) == Some(fixed) || lost,
                    "the verdict of {state:?} changed on {event:?}"
                );
            }
            if next == S::Completed {
                prop_assert_eq!(state, S::Finalizing(V::Completed));
            }
            state = next;
        }
    }

    #[test]
    fn test_job_ends_when_faults_are_over(events in prop::collection::vec(job_event(), 0..60)) {
        let apply = |state: S, event| state.after(event).unwrap_or(state);
        let state = events.into_iter().fold(S::Queued, apply);
        let calm = [E::SeenAgain, E::Placed, E::AllRunning, E::AllSucceeded, E::OutputsStored];
        prop_assert!(calm.into_iter().fold(state, apply).is_terminal());
    }

    #[test]
    fn test_silence_and_return_change_nothing(events in prop::collection::vec(job_event(), 0..30)) {
        let state = events.into_iter().fold(S::Queued, |state, event| state.after(event).unwrap_or(state));
        if let Some(silent) = state.after(E::LeaseExpired) {
            prop_assert_eq!(silent.after(E::SeenAgain), Some(state));
        }
    }

    #[test]
    fn test_cancel_asked_twice_is_asked_once(events in prop::collection::vec(job_event(), 0..30)) {
        let state = events.into_iter().fold(S::Queued, |state, event| state.after(event).unwrap_or(state));
        if let Some(canceled) = state.after(E::CancelRequested) {
            prop_assert_eq!(canceled.after(E::CancelRequested), None);
        }
    }
}

#[test]
fn test_every_state_has_its_own_name() {
    let names: std::collections::BTreeSet<_> = job_states().into_iter().map(S::name).collect();
    assert_eq!(names.len(), 8);
    assert_eq!(format!("{:>9}|", S::Running), "  Running|");
}

#[test]
fn test_placed_is_neither_queued_nor_ended() {
    for state in job_states() {
        assert_eq!(state.is_placed(), state != S::Queued && !state.is_terminal(), "{state:?}");
    }
}

const REPLICA_EVENTS: [ReplicaEvent; 6] = [
    ReplicaEvent::StepDone,
    ReplicaEvent::Resumed,
    ReplicaEvent::Started,
    ReplicaEvent::GaveUp,
    ReplicaEvent::Ended,
    ReplicaEvent::Refused,
];

#[test]
fn test_replica_follows_its_table_and_nothing_else() {
    use ReplicaStep as R;
    // step, done, resumed, started, gave up, ended, refused
    let (accepted, running, releasing) = (Some(R::Accepted), Some(R::Running), Some(R::Releasing));
    let uploading = Some(R::Uploading);
    let table = [
        (R::Accepted, [Some(R::Fetching), accepted, running, uploading, releasing, None]),
        (R::Fetching, [Some(R::Building), accepted, running, uploading, releasing, None]),
        (R::Building, [Some(R::Launching), accepted, running, uploading, releasing, None]),
        (R::Launching, [running, accepted, running, uploading, releasing, None]),
        (R::Running, [releasing, None, running, None, releasing, None]),
        (R::Releasing, [uploading, None, releasing, None, releasing, None]),
        (R::Uploading, [Some(R::Reported), None, None, None, None, None]),
        (R::Reported, [None, None, None, None, None, uploading]),
    ];
    assert_eq!(table.map(|row| row.0), ReplicaStep::ALL);
    for (step, expected) in table {
        assert_eq!(REPLICA_EVENTS.map(|event| step.after(event)), expected, "{step}");
    }
}

proptest! {
    #[test]
    fn test_replica_goes_back_only_before_its_command_or_to_store_once_more(events in prop::collection::vec(prop::sample::select(&REPLICA_EVENTS[..]), 0..30)) {
        let mut step = ReplicaStep::Accepted;
        let mut visited = vec![step];
        for event in events {
            let Some(next) = step.after(event) else { continue };
            let again = next == step && [ReplicaStep::Running, ReplicaStep::Releasing].contains(&step);
            let anew = event == ReplicaEvent::Resumed && step < ReplicaStep::Running;
            let once_more = event == ReplicaEvent::Refused && step == ReplicaStep::Reported;
            prop_assert!(next > step || again || anew || once_more, "{step} went to {next} on {event:?}");
            step = next;
            visited.push(step);
        }
        if visited.contains(&ReplicaStep::Running) && step >= ReplicaStep::Uploading {
            prop_assert!(visited.contains(&ReplicaStep::Releasing), "a started command was not released");
        }
        if step == ReplicaStep::Reported {
            prop_assert!(visited.contains(&ReplicaStep::Uploading), "reported before the log was stored");
        }
    }
}

#[test]
fn test_node_liveness_follows_its_table() {
    use Liveness as L;
    use LivenessEvent as N;
    let (well, ill) = (N::Synced { healthy: true }, N::Synced { healthy: false });
    // liveness, synced well, synced ill, lease over, grace over, removed
    let table = [
        (L::Enrolling, [L::Ready, L::Degraded, L::Enrolling, L::Enrolling, L::Removed]),
        (L::Ready, [L::Ready, L::Degraded, L::NotResponding, L::Ready, L::Removed]),
        (L::Degraded, [L::Ready, L::Degraded, L::NotResponding, L::Degraded, L::Removed]),
        (L::NotResponding, [L::Ready, L::Degraded, L::NotResponding, L::Down, L::Removed]),
        (L::Down, [L::Ready, L::Degraded, L::Down, L::Down, L::Removed]),
        (L::Removed, [L::Removed; 5]),
    ];
    for (from, to) in table {
        assert_eq!([well, ill, N::LeaseOver, N::GraceOver, N::Remove].map(|e| from.after(e)), to, "{from:?}");
    }
}

#[test]
fn test_node_eligibility_follows_its_table() {
    use Eligibility as L;
    use EligibilityEvent as N;
    // eligibility, drain, empty, cordon, uncordon
    let table = [
        (L::Open, [L::Draining, L::Open, L::Cordoned, L::Open]),
        (L::Draining, [L::Draining, L::Cordoned, L::Cordoned, L::Open]),
        (L::Cordoned, [L::Cordoned, L::Cordoned, L::Cordoned, L::Open]),
    ];
    for (from, to) in table {
        assert_eq!([N::Drain, N::Empty, N::Cordon, N::Uncordon].map(|e| from.after(e)), to, "{from:?}");
    }
}
