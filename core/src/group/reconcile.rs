//! A rank's part in a reconciliation: after a mismatch the ranks exchange their lists of calls until they agree which
//! calls to run or to fail ([`crate::collective::matching`]).
//!
//! Thread rule: as for [`Worker`].

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use super::callers::Origin;
use super::memory_use::{SharedMemory, shared_memory};
use super::other_groups::OtherGroups;
use super::process_groups::WaitingGroup;
use super::queue::{Ended, Queue};
use super::state::GroupState;
use super::unfinished::UnfinishedCalls;
use super::work::{Role, Work};
use super::worker::Worker;
use crate::buffer::{Buffer, Tensor};
use crate::collective::matching::{
    Age, FurtherCalls, PendingCall, PendingCalls, PendingKind, RankStatus, Reconciliation,
};
use crate::collective::{Bounds, Call, Counts, MismatchEntry, Op};
use crate::deadline::Deadline;
use crate::error::{Error, Result};

/// Maximum pause between two exchanges; a new common call is found within it.
pub(super) const MAX_BACKOFF: Duration = Duration::from_millis(20);
/// Calls fail this much earlier if nothing else can come.
pub(super) const EARLY_DIVISOR: u32 = 30;

/// Why calls fail that are equal on all ranks.
const CONTRARY: &str = "\n  It shares memory with other calls, which the ranks have started in contrary orders. Start calls on the same \
                        memory in the same order on all ranks, or wait in between.";

impl Worker {
    /// Reconciles after a mismatch: moves the calls that all ranks have to the front of the queue, or fails a call.
    /// Returns a call of this rank that has ended and is not finished.
    pub fn reconcile(
        &mut self,
        queue: &mut Queue,
        unfinished: &mut UnfinishedCalls,
        other_groups: OtherGroups,
    ) -> Option<Ended> {
        let shared = Arc::clone(&self.shared);
        let reconciling = shared.reconciling.begin();
        queue.differs = false;
        queue.gather();
        let ended = self.run_rounds(queue, unfinished, other_groups);
        queue.set_aside();
        shared.process_groups.note_awaiting(shared.number, Vec::new(), String::new);
        shared.lacks_calls.store(false, Ordering::Release);
        drop(reconciling);
        if let Some(Ended::Call(_, Err(Error::Mismatch(_)))) = &ended {
            shared.process_groups.settle(Some(&*shared));
        }
        ended
    }

    fn run_rounds(
        &mut self,
        queue: &mut Queue,
        unfinished: &mut UnfinishedCalls,
        mut other_groups: OtherGroups,
    ) -> Option<Ended> {
        let mut pause = Duration::from_millis(1);
        let absent = Call::waiting(self.shared.config.clone()).ok()?;
        let absent = Arc::new(Work::absent(absent, Arc::clone(&self.shared.recorder)));
        loop {
            queue.drain();
            queue.end_overdue();
            if queue.calls.is_empty() {
                other_groups.poll(&self.shared);
            }
            let list = self.list(queue, &other_groups);
            // The limits of the exchanges. The deadline of a call by name is not that of the others.
            let head = Arc::clone(queue.calls.iter().find(|work| !work.call.is_by_name()).unwrap_or(&absent));
            let own_rank = self.rank;
            let decision = self.run_checked(&head, |channel, _, wait_ctx| {
                let (decision, lacking) = channel.reconcile(&list, wait_ctx)?;
                queue.note_lacking(&lacking);
                if let Reconciliation::Wait(ranks) = &decision {
                    // The exchanges themselves do not wait for missing calls.
                    let counterpart = || {
                        let others = ranks.iter().enumerate().filter(|(rank, _)| *rank != own_rank);
                        let texts = others.map(|(rank, status)| format!("rank {rank} {}", status.describe()));
                        format!("its counterpart; {}", texts.collect::<Vec<_>>().join(", "))
                    };
                    wait_ctx.check(Duration::ZERO, &counterpart)?;
                }
                Ok(decision)
            });
            match decision {
                Ok(Reconciliation::Run(order)) => {
                    queue.decide(&order);
                    return None;
                }
                Ok(Reconciliation::StandIn(signature)) => return self.stand_in(queue, unfinished, &head, signature),
                Ok(Reconciliation::Fail(positions)) => {
                    if positions.iter().any(Option::is_none) {
                        self.shared.process_groups.count_failed_call();
                    }
                    return self.fail_call(queue, &head, positions[self.rank], "", None, &other_groups);
                }
                Ok(Reconciliation::Contrary(positions)) => {
                    return self.fail_call(queue, &head, positions[self.rank], CONTRARY, None, &other_groups);
                }
                Ok(Reconciliation::Refused(positions)) => {
                    let position = positions[self.rank];
                    let take = || self.shared.process_groups.take_refused();
                    let refused = if position.is_none() { take() } else { None };
                    return self.fail_call(queue, &head, position, "", refused, &other_groups);
                }
                Ok(Reconciliation::ByPairs(signature)) => self.name_pairs(queue, signature),
                Ok(Reconciliation::Wait(ranks)) => {
                    self.note_awaiting(queue, &ranks);
                    queue.calls.front().into_iter().for_each(|oldest| self.shared.check_deadlock(&oldest.record));
                    pause = if queue.wait_for_more(pause) {
                        Duration::from_millis(1)
                    } else {
                        (2 * pause).min(MAX_BACKOFF)
                    };
                }
                Err(error) => return queue.calls.pop_front().map(|head| Ended::Call(head, Err(error))),
            }
        }
    }

    /// Notes whether some rank has no call; and which ranks have no other call to make before one of this rank ends, which
    /// makes none.
    fn note_awaiting(&self, queue: &Queue, ranks: &[RankStatus]) {
        let shared = &self.shared;
        let lacks_calls = ranks.iter().any(|status| !status.calls && !status.refused);
        shared.lacks_calls.store(lacks_calls, Ordering::Release);
        let has_refused = ranks.get(self.rank).is_some_and(|status| status.refused);
        let awaits = |status: &RankStatus| {
            !has_refused
                && queue.calls.is_empty()
                && status.calls
                && !status.joined
                && status.further_calls == FurtherCalls::Settled
        };
        let awaiting = ranks.iter().enumerate().filter(|(_, status)| awaits(status));
        let awaiting = awaiting.map(|(rank, _)| shared.members.to_world(rank)).collect();
        let call = || format!("a call on {} that {} has not made", shared.config.key.name(), shared.rank_name());
        shared.process_groups.note_awaiting(shared.number, awaiting, call);
    }

    /// Gives the calls with this signature by pairs that form: for some rank their lengths differ between the ranks, or
    /// were given although they do not.
    fn name_pairs(&self, queue: &mut Queue, signature: u64) {
        for work in &mut queue.calls {
            if let Some(call) = by_pairs(work, &self.shared).filter(|call| call.signature == signature) {
                *work = Arc::new(work.with_call(call));
            }
        }
    }

    /// Moves the call with `signature` to the front; a rank that has joined makes it, with zeros. A call on device memory
    /// then runs on copies in host memory.
    fn stand_in(
        &mut self,
        queue: &mut Queue,
        unfinished: &mut UnfinishedCalls,
        head: &Arc<Work>,
        signature: u64,
    ) -> Option<Ended> {
        let first = queue.calls.front().cloned()?;
        let joined = match &first.role {
            Role::Join(state) => Some(state),
            _ => None,
        };
        let described = queue.calls.iter().find(|work| joined.is_none() && work.call.signature == signature).cloned();
        let blueprint = self.run_checked(head, |channel, _, wait_ctx| {
            channel.share_blueprint(described.as_ref().map(|work| &work.call), wait_ctx)
        });
        let shared = &self.shared;
        let stand_in = match (blueprint, joined) {
            (Ok(_), None) => {
                queue.decide(&[signature]);
                let first = queue.pop()?;
                let on_host = match first.call.producer() {
                    None => Ok(Arc::clone(&first)),
                    Some(_) => unfinished.wait_for_turn(&first, false).and_then(|first| self.copy_to_host(&first)),
                };
                return match on_host {
                    Ok(work) => {
                        queue.push_decided(work);
                        None
                    }
                    Err(error) => Some(Ended::Call(first, Err(error))),
                };
            }
            (Ok(blueprint), Some(state)) => {
                state.count();
                // The other ranks already start the call.
                blueprint.zeros(shared.config.clone()).inspect_err(|error| shared.fail(error))
            }
            (Err(error), _) => Err(error),
        };
        match stand_in {
            Ok((call, zeros)) => {
                let record = shared.recorder.open(&call, None, Deadline::default(), Origin::default());
                let done = Box::new(move |_: Result<()>| drop(zeros));
                let work =
                    Work::new(call, Role::StandIn, done, Deadline::default(), record, Arc::clone(&shared.recorder));
                queue.push_decided(Arc::new(work));
                None
            }
            Err(error) => queue.calls.pop_front().map(|head| Ended::Call(head, Err(error))),
        }
    }

    /// This rank's pending calls.
    fn list(&self, queue: &Queue, other_groups: &OtherGroups) -> PendingCalls {
        let shared = &self.shared;
        // Expire before the deadline, to report a mismatch instead of a timeout.
        let match_timeout = |work: &Work| {
            work.deadline
                .after
                .map_or(shared.settings.match_timeout, |timeout| shared.settings.match_timeout.min(timeout / 3))
        };
        let memory = shared_memory(queue.calls.iter().map(|work| &work.call));
        let pending = |(work, memory): (&Arc<Work>, SharedMemory)| PendingCall {
            signature: work.call.signature,
            by_pairs: by_pairs(work, shared).map_or(0, |call| call.signature),
            key: work.call.key(),
            by_name: work.call.is_by_name(),
            kind: match work.role {
                Role::Join(_) => PendingKind::Join,
                _ if work.call.takes_zeros() => PendingKind::TakesZeros,
                _ => PendingKind::NeedsAll,
            },
            age: match work.unmatched_since().elapsed() {
                _ if matches!(work.role, Role::Join(_)) || work.call.is_by_name() => Age::New,
                unmatched if unmatched > match_timeout(work) => Age::Expired,
                unmatched if unmatched > match_timeout(work) / EARLY_DIVISOR => Age::Conflicting,
                _ => Age::New,
            },
            memory: memory.part,
            stays_behind: memory.conflicts,
        };
        let quiet = queue.calls.front().is_some_and(|head| {
            let unchanged = queue.arrived.max(head.unmatched_since()).elapsed();
            let all_blocked = || {
                let mut waiting = shared.process_groups.waiting(shared.stall_check_after);
                waiting.extend(queue.calls.iter().filter_map(|work| work.record.origin.waiting()));
                shared.callers_are_among(&waiting, other_groups.is_idle(shared))
            };
            unchanged > match_timeout(head) / EARLY_DIVISOR && all_blocked()
        });
        let all_blocked = || {
            let is_idle = other_groups.is_idle(shared);
            shared.process_groups.all_blocked(shared.stall_check_after, is_idle)
        };
        let further_calls = match queue.calls.front() {
            _ if queue.closed => FurtherCalls::Closed,
            None => other_groups.further_calls(shared, queue.arrived),
            Some(_) if quiet && all_blocked() => FurtherCalls::Settled,
            Some(_) => other_groups.unsettled(),
        };
        queue.calls.iter().for_each(|work| work.record.set_unmatched(work.call.is_by_name()));
        let refused = shared.process_groups.has_refused();
        PendingCalls { calls: queue.calls.iter().zip(memory).map(pending).collect(), further_calls, quiet, refused }
    }

    /// Fails the call at `position`, for this `reason` beside what each rank has there; without one, only takes part in the report
    /// about the calls of others, perhaps with the error of the call that this rank has `refused`.
    fn fail_call(
        &mut self,
        queue: &mut Queue,
        head: &Arc<Work>,
        position: Option<usize>,
        reason: &str,
        refused: Option<String>,
        other_groups: &OtherGroups,
    ) -> Option<Ended> {
        let failed = position.and_then(|position| queue.calls.remove(position));
        let entry = match &failed {
            Some(work) => MismatchEntry::Call(&work.call),
            None => MismatchEntry::None(match (refused, queue.calls.front()) {
                (Some(error), _) => format!("has refused its call: {error}"),
                (None, None) => other_groups.describe(&self.shared, queue.closed),
                (None, Some(first)) => {
                    let name = first.call.full_name();
                    match &first.role {
                        Role::Join(_) => format!("has joined, and takes part in sums and means only ({name})"),
                        _ => format!("nothing that matches; it waits for {name}"),
                    }
                }
            }),
        };
        let result = self.run_checked::<()>(head, |channel, _, wait_ctx| {
            Err(match channel.explain(&entry, wait_ctx) {
                Error::Mismatch(text) => Error::Mismatch(text + reason),
                other => other,
            })
        });
        Some(Ended::Call(failed?, result))
    }
}

/// An all-to-all of even blocks as one that names the length for each pair; `None` for other calls. The first extent of a
/// block is not compared then, so it must be the only one.
fn by_pairs(work: &Work, shared: &GroupState) -> Option<Call> {
    let (call, config) = (&work.call, &shared.config);
    let is_even = call.op == Op::ALLTOALL && *call.counts() == Counts::Even;
    let has_columns = call.tensors(0).iter().any(|tensor| tensor.shape().len() > 1);
    if !is_even || !matches!(work.role, Role::Own) || call.towers() > 1 || has_columns {
        return None;
    }
    let bounds = |tensor: &Tensor| Bounds::new(&vec![tensor.buffer.len(); config.ranks]);
    let bounds = call.tensors(0).iter().map(bounds).collect::<Option<Vec<_>>>()?;
    let counts = Counts::Pairs { send: bounds.clone(), receive: bounds };
    let memory = |tensor: &Tensor| {
        let buffer = &tensor.buffer;
        Tensor::new(Buffer::new(buffer.source_at(0), buffer.dst(), 0, buffer.dtype()), tensor.shape())
    };
    let memory = call.tensors(0).iter().map(memory).collect();
    // The call was valid, and so is this one.
    let names = call.tensor_names().text().to_owned();
    let by_pairs = Call::new(call.op, vec![memory], counts, call.name(), "", names, config.clone()).ok()?;
    let by_pairs = if call.is_by_name() { by_pairs.into_by_name().ok()? } else { by_pairs };
    match call.producer() {
        None => Some(by_pairs),
        Some(producer) => by_pairs.on_device(Arc::clone(producer), shared.settings.device.chunk).ok(),
    }
}
