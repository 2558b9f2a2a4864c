//! The book, and the receivers of its changes: watchers of jobs, nodes with an open stream, and callers that wait for
//! a wish or for outputs.
//!
//! Hides the receivers. Invariant: changes of the book are sent only by [`Publisher::publish`] and by the answers
//! that [`Publisher::handle`] returns, and the task runs neither before everything they depend on is durable.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;

use agent_model::job::Change;
use agent_model::machine::EligibilityEvent;
use agent_model::{Fault, JobId, NodeId, ReplicaId};
use tokio::sync::{oneshot, watch};

use super::book::{Book, Judgement, Moment, NodeState, RemovedNode, Report, Wish, WishState};
use super::{Answer, JobView, OrdersReceiver, Request, Saved, WantedOutputs, Wished};
use crate::lease::Orders;
use crate::store::JobRecord;

/// See the module.
pub(super) struct Publisher {
    pub(super) book: Book,
    watchers: HashMap<JobId, watch::Sender<JobView>>,
    links: BTreeMap<NodeId, Link>,
    last_link: u64,
    /// Callers that wait for a wish about an environment.
    wishers: Vec<(Wish, watch::Sender<WishState>)>,
    /// Callers that wait until a node has stored outputs.
    savers: Vec<Saver>,
}

/// A caller that waits for outputs.
struct Saver {
    wanted: WantedOutputs,
    told: oneshot::Sender<Saved>,
}

/// One open Sync stream.
struct Link {
    id: u64,
    orders: watch::Sender<Arc<Orders>>,
    /// A report arrived that was not answered yet.
    owed: bool,
}

impl Publisher {
    /// A publisher without receivers.
    pub(super) fn new(book: Book) -> Publisher {
        Publisher {
            book,
            watchers: HashMap::new(),
            links: BTreeMap::new(),
            last_link: 0,
            wishers: Vec::new(),
            savers: Vec::new(),
        }
    }

    /// Carries out a request; the answer may be sent once everything it depends on is durable.
    pub(super) fn handle(&mut self, request: Request, now: Moment) -> Answer {
        tracing::trace!(?request);
        let book = &mut self.book;
        match request {
            Request::Submit(new, reply) => reply.hold(book.try_submit(new, now)),
            Request::Cancel { job, who, reply } => {
                let known = book.cancel(&job, &who, now);
                reply.hold(known.and_then(|()| self.view(&job)))
            }
            Request::Hold { job, held, who, reply } => {
                let waits = book.hold(&job, held, &who, now);
                reply.hold(self.view(&job).filter(|_| waits))
            }
            Request::Change { job, change, who, reply } => reply.hold(self.change(&job, &change, &who, now)),
            Request::Job(id, reply) => reply.hold(self.view(&id)),
            Request::Jobs(reply) => reply.hold(self.views()),
            Request::Showing(_) => Box::new(|_| {}), // is answered when it is known what is on disk
            Request::ComeRound(reply) => reply.hold(()),
            Request::Nodes(reply) => reply.hold(book.nodes().cloned().collect()),
            Request::SetEligibility { node, event, who, reply } => {
                reply.hold(self.set_eligibility(&node, event, &who))
            }
            Request::Outlook { prospects, reply } => reply.hold(book.outlook(prospects, now)),
            Request::Retire(node, reply) => reply.hold(book.retire_node(&node)),
            Request::Preempt { node, said, who, reply } => {
                tracing::warn!(%node, who, ?said, "asked to expect the end of the machine");
                reply.hold(book.preempt(&node, said, now).cloned())
            }
            Request::DeclareLost { node, who, reply } => {
                let declared = book.declare_lost(&node, &who, now);
                tracing::warn!(%node, who, ?declared, "asked to declare the node lost");
                reply.hold(declared)
            }
            Request::Judge { node, replica, judgement, who, reply } => {
                reply.hold(self.judge(&node, &replica, judgement, &who))
            }
            Request::Wish { wish, who, reply } => reply.hold(self.wish(wish, &who)),
            Request::Flush(reply) => {
                book.hurry();
                reply.hold(())
            }
            Request::RemoveNode { node, lose_jobs, who, reply } => {
                reply.hold(self.remove_node(&node, lose_jobs, &who, now))
            }
            Request::Write { documents, dropped, reply } => {
                book.write(documents, dropped);
                reply.hold(())
            }
            Request::AddAsset(asset, reply) => reply.hold(book.add_asset(*asset)),
            Request::ChangeAssets(change, reply) => reply.hold(book.change_assets(&change)),
            Request::Link(report, reply) => reply.hold(self.link(&report, now)),
            Request::Report { link, report, reply } => reply.hold(self.report(link, &report, now)),
            Request::Standing { replica, node, reply } => reply.hold(book.standing(&replica, &node)),
            Request::WantsLog(replica, reply) => reply.hold(book.wants_log(&replica)),
            Request::Observe { replica, logged, reply } => reply.hold(book.observe(&replica, *logged, now)),
            Request::Settle { replica, node, outcome, found, reply } => {
                book.note_found(&replica, &node, found);
                reply.hold(book.settle(&replica, &node, outcome, now))
            }
            Request::WantOutputs { wanted, reply } => reply.hold(self.want_outputs(wanted)),
            Request::TellOutputs { wanted, saved, reply } => {
                self.tell_outputs(&wanted, &saved);
                reply.hold(())
            }
            Request::ReuseChecked(step, whole, reply) => reply.hold(book.reuse_checked(&step, whole, now)),
            Request::NoteSoFar { replica, node, artifacts, reply } => {
                book.note_so_far(&replica, &node, artifacts);
                reply.hold(())
            }
            Request::OutputsStored { job, node, artifacts, reply } => {
                book.stored_later(*job, &node, artifacts, now);
                reply.hold(())
            }
            Request::Remove { job, reply } => reply.hold(book.remove(*job, now)),
            Request::KeptUpBy(work, reply) => reply.hold(book.kept_up_by(work)),
            Request::Close { why, work, reply } => reply.hold(book.close(&why, work)),
            Request::Open(reply) => {
                book.open();
                reply.hold(())
            }
        }
    }

    fn change(
        &mut self,
        job: &JobId,
        change: &Change,
        who: &str,
        now: Moment,
    ) -> Option<Result<JobView, Fault>> {
        match self.book.change(job, change, who, now) {
            Err(fault) => Some(Err(fault)),
            Ok(is_known) => self.view(job).filter(|_| is_known).map(Ok),
        }
    }

    fn set_eligibility(&mut self, node: &NodeId, event: EligibilityEvent, who: &str) -> Option<NodeState> {
        let state = self.book.set_eligibility(node, event).cloned();
        let eligibility = state.as_ref().map(|state| state.record.eligibility);
        tracing::info!(%node, who, ?eligibility, "asked to set eligibility of node");
        state
    }

    fn want_outputs(&mut self, wanted: WantedOutputs) -> Option<oneshot::Receiver<Saved>> {
        self.links.get(&wanted.node).filter(|link| !link.orders.is_closed())?;
        let (told, receiver) = oneshot::channel();
        self.savers.push(Saver { wanted, told });
        Some(receiver)
    }

    fn tell_outputs(&mut self, wanted: &WantedOutputs, saved: &Saved) {
        for saver in self.savers.extract_if(.., |saver| saver.wanted == *wanted) {
            let _ = saver.told.send(saved.clone()); // the caller may be gone
        }
    }

    fn remove_node(&mut self, node: &NodeId, lose_jobs: bool, who: &str, now: Moment) -> RemovedNode {
        let removed = self.book.remove_node(node, lose_jobs, who, now);
        if matches!(removed, RemovedNode::Done(_)) {
            self.links.remove(node); // ends its stream
        }
        tracing::warn!(%node, who, ?removed, "asked to remove the node");
        removed
    }

    fn judge(&mut self, node: &NodeId, replica: &ReplicaId, judgement: Judgement, who: &str) -> bool {
        let done = self.book.judge(node, replica, judgement);
        tracing::warn!(%node, %replica, who, ?judgement, done, "asked to judge a replica that is not proved");
        done
    }

    fn wish(&mut self, wish: Wish, who: &str) -> Wished {
        let Wish { node, key, want } = &wish;
        let before = self.book.environment(node, key).cloned();
        let state = self.book.wish(&wish);
        tracing::info!(%node, key, who, want = want.name(), ?state, "asked to manage environment");
        let (sender, receiver) = watch::channel(state);
        self.wishers.push((wish, sender));
        (before, receiver)
    }

    pub(super) fn view(&self, id: &JobId) -> Option<JobView> {
        let job = self.book.job(id).cloned().or_else(|| self.book.waiting_task(id))?;
        Some(show(&self.book, &job))
    }

    pub(super) fn views(&self) -> Vec<JobView> {
        self.book.jobs().map(|job| show(&self.book, job)).collect()
    }

    pub(super) fn watch(&mut self, id: &JobId) -> Option<watch::Receiver<JobView>> {
        self.view(id).map(|view| self.watch_from(view))
    }

    /// A job as it changes from `view` on.
    pub(super) fn watch_from(&mut self, view: JobView) -> watch::Receiver<JobView> {
        if view.job.state.is_terminal() {
            return watch::channel(view).1;
        }
        self.watchers.entry(view.job.id.clone()).or_insert_with(|| watch::channel(view).0).subscribe()
    }

    fn link(&mut self, report: &Report, now: Moment) -> (u64, OrdersReceiver) {
        self.last_link += 1;
        let (orders, receiver) = watch::channel(Arc::default());
        self.links.insert(report.node.clone(), Link { id: self.last_link, orders, owed: true });
        self.book.report(report, now);
        (self.last_link, receiver)
    }

    fn report(&mut self, id: u64, report: &Report, now: Moment) -> bool {
        let Some(link) = self.links.get_mut(&report.node).filter(|link| link.id == id) else { return false };
        link.owed = true;
        self.book.report(report, now);
        true
    }

    /// Rules that need no message, then the scheduler.
    pub(super) fn settle_rules(&mut self, now: Moment) {
        self.book.expire(now);
        self.links.retain(|_, link| !link.orders.is_closed());
        let links = &self.links;
        self.book.link(|node| links.contains_key(node));
        self.book.schedule(now);
    }

    /// Sends the states of wishes to those who wait for them; a wish nobody waits for is removed.
    fn attend_wishers(&mut self) {
        let book = &mut self.book;
        self.wishers.retain(|(wish, told)| {
            let state = book.wish_state(wish, false);
            let open = matches!(state, WishState::Open { .. }) && told.receiver_count() > 0;
            told.send_if_modified(|known| {
                let settled = !matches!(known, WishState::Open { .. });
                let changed = !settled && *known != state;
                if changed {
                    *known = state;
                }
                changed
            });
            if !open {
                book.unwish(wish);
            }
            open
        });
    }

    /// Sends the changes to watchers and nodes.
    pub(super) fn publish(&mut self) {
        self.attend_wishers();
        let book = &self.book;
        self.watchers.retain(|id, watcher| {
            let Some(job) = book.job(id).cloned().or_else(|| book.waiting_task(id)) else { return false };
            let view = show(book, &job);
            let over = view.job.state.is_terminal();
            watcher.send_if_modified(|shown| {
                let changed = !shown.same(&view);
                *shown = view;
                changed
            });
            !over && watcher.receiver_count() > 0
        });
        self.savers.retain(|saver| !saver.told.is_closed());
        for (node, link) in &mut self.links {
            let mut orders = book.orders(node);
            for wanted in self.savers.iter().map(|saver| &saver.wanted).filter(|wanted| wanted.node == *node)
            {
                let list = if wanted.running { &mut orders.running_outputs } else { &mut orders.outputs };
                list.push(wanted.replica.clone());
            }
            let owed = std::mem::take(&mut link.owed);
            let revision = link.orders.borrow().revision;
            let same = {
                let told = link.orders.borrow();
                told.list == orders.list
                    && told.environments == orders.environments
                    && told.outputs == orders.outputs
                    && told.running_outputs == orders.running_outputs
                    && told.discard == orders.discard
                    && told.preemption == orders.preemption
            };
            if owed || !same {
                link.orders.send_replace(Arc::new(Orders { revision: revision + 1, ..orders }));
            }
        }
    }
}

fn show(book: &Book, job: &Arc<JobRecord>) -> JobView {
    JobView { job: Arc::clone(job), detail: book.detail(job) }
}
