//! Deliberate mistakes: each switches off one rule that the protocol depends on, and must be caught.
//!
//! Those of the controller are in its own code, behind `broken!`; those of the node and of the disk are in the
//! simulator's node and disk, to which their rules apply.

use std::cell::Cell;

thread_local! {
    static CURRENT: Cell<Mutant> = const { Cell::new(Mutant::None) };
}

/// Whether this is the mistake made on this thread.
pub(crate) fn is(mutant: Mutant) -> bool {
    CURRENT.get() == mutant
}

/// Makes this mistake on this thread from now on.
pub(super) fn make(mutant: Mutant) {
    CURRENT.set(mutant);
}

macro_rules! mutants {
    ($($name:ident $title:literal;)*) => {
        /// A deliberate mistake.
        #[derive(Debug, Clone, Copy, PartialEq, Eq)]
        pub(crate) enum Mutant {
            $($name,)*
        }

        impl Mutant {
            pub(super) const ALL: &'static [Mutant] = &[$(Mutant::$name,)*];

            /// What is done wrong, as text.
            pub(super) fn title(self) -> &'static str {
                match self { $(Mutant::$name => $title,)* }
            }
        }
    };
}

mutants! {
    None "nothing";
    NoKillGrace "a job is given away without time to end it";
    LeaseFromReceipt "a node counts its lease from the receipt of the answer";
    AgentEnforcesAlone "only the agent ends a run whose lease is over";
    RestartResetsLease "a restart of the agent renews the leases of its runs";
    LeasesForgotten "a controller that restarts takes every lease for over";
    NoEpochCheck "a result counts whatever its epoch";
    NoStartMark "no mark says that a command was started";
    LeaseWithoutEvidence "a report renews a run that nobody vouches for";
    AckBeforeCommit "log bytes are acknowledged before they are stored";
    NoOffsetDedup "log bytes that came before are stored again";
    LastCommitLost "a crash of the controller takes back its last commit";
    HoldGivenAway "a held job is given away because its node is silent";
    ChangeForgotten "a controller that restarts forgets what was changed of jobs";
    CancelForgotten "a controller that restarts forgets cancels";
    LeaseOfAnotherBoot "a time granted in one boot of a node is sent to the next";
    OvertakenReports "a report counts although a later one was heard";
    ControllerEpochNotChecked "a report counts although it may be a copy from before the controller started";
    LifeOfAnotherBoot "a report counts although it may be a copy from before the machine started";
    OvertakenOrders "orders are obeyed although later ones were";
    CancelWithoutProof "a canceled job ends before its node can no longer start it";
    StartsUnleased "a command is started although its lease is over";
    GoWithoutAll "a gang goes although not every rank could start";
    GoNotRecorded "a controller that restarts forgets that a gang goes";
    StartedRankGivenUp "a rank that was told to go is given up because its node is silent";
    GoOfAnotherEpoch "a rank starts because an earlier attempt of its job was told to go";
    GoDateIgnored "a rank starts after the date by which it had to";
    BusyRetires "a machine goes although jobs are placed on it";
    StepBeforeInput "a step starts before what it reads is there";
    ReuseOfAnother "a step takes what a step with another key left";
    StepMadeTwice "a step that has a record is made once more";
    CancelLeavesStep "a cancel of a pipeline does not reach its steps";
    GangRestartedPartly "one lost rank of a gang is started again beside the others";
}
