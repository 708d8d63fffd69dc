//! What the lead does when the ranks met with different calls: they tell each other their lists of calls, until it is known
//! which calls are carried out next, or given up ([`crate::collective::lineup`]).
//!
//! Thread rule: as for [`Worker`].

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use super::executor::Queue;
use super::other_groups::OtherGroups;
use super::work::Work;
use super::worker::Worker;
use crate::collective::MismatchEntry;
use crate::collective::matching::{Age, Outlook, PendingCall, PendingCalls, Reconciliation};
use crate::error::{Error, Result};

/// The longest that the lead looks away from the other ranks meanwhile: a call that all ranks have is found within it.
pub(super) const MAX_BACKOFF: Duration = Duration::from_millis(20);
/// How much sooner a call is given up when nothing else can come.
pub(super) const EARLY_DIVISOR: u32 = 30;

impl Worker {
    /// The ranks met with different calls: brings those that all have to the front of the queue, or gives one up, once it
    /// is known which; returns a call of this rank that has ended so. `absent` stands for the calls of a rank that has none.
    pub fn reconcile(
        &mut self,
        queue: &mut Queue<'_>,
        absent: Option<&Arc<Work>>,
        other_groups: OtherGroups,
    ) -> Option<(Arc<Work>, Result<()>)> {
        self.shared.is_reconciling.store(true, Ordering::Release);
        let ended = self.run_rounds(queue, absent, other_groups);
        self.shared.is_reconciling.store(false, Ordering::Release);
        if let Some((_, Err(Error::Mismatch(_)))) = &ended {
            self.shared.process_groups.settle(&*self.shared);
        }
        ended
    }

    fn run_rounds(
        &mut self,
        queue: &mut Queue<'_>,
        absent: Option<&Arc<Work>>,
        mut other_groups: OtherGroups,
    ) -> Option<(Arc<Work>, Result<()>)> {
        let mut nap = Duration::from_millis(1);
        loop {
            queue.drain();
            if queue.calls.is_empty() {
                other_groups.poll(&self.shared);
            }
            let list = self.list(queue, &other_groups);
            let head = Arc::clone(queue.calls.front().or(absent)?);
            let own = self.rank;
            let decision = self.run_checked(&head, |channel, _, wait_ctx| {
                let decision = channel.reconcile(&list, wait_ctx)?;
                if let Reconciliation::Wait(ranks) = &decision {
                    // The rounds themselves do not wait for what is missing.
                    let counterpart = || {
                        let others = ranks.iter().enumerate().filter(|(rank, _)| *rank != own);
                        let words = others.map(|(rank, standing)| format!("rank {rank} {}", standing.describe()));
                        format!("its counterpart; {}", words.collect::<Vec<_>>().join(", "))
                    };
                    wait_ctx.check(Duration::ZERO, &counterpart)?;
                }
                Ok(decision)
            });
            match decision {
                Ok(Reconciliation::Run(order)) => {
                    queue.reorder(&order);
                    return None;
                }
                Ok(Reconciliation::Fail(places)) => {
                    return self.fail_call(queue, &head, places[self.rank], &other_groups);
                }
                Ok(Reconciliation::Wait(_)) => {
                    nap = if queue.wait_for_more(nap) { Duration::from_millis(1) } else { (2 * nap).min(MAX_BACKOFF) };
                }
                Err(error) => return queue.calls.pop_front().map(|head| (head, Err(error))),
            }
        }
    }

    /// What this rank tells of its calls.
    fn list(&self, queue: &Queue<'_>, other_groups: &OtherGroups) -> PendingCalls {
        let shared = &self.shared;
        // Before the deadline, so that what differs is told rather than that time is up.
        let within = |work: &Work| {
            work.timeout.map_or(shared.settings.match_timeout, |timeout| shared.settings.match_timeout.min(timeout / 3))
        };
        let pending = |work: &Arc<Work>| PendingCall {
            signature: work.call.signature,
            key: work.call.key(),
            age: match work.alone_since().elapsed() {
                alone if alone > within(work) => Age::Expired,
                alone if alone > within(work) / EARLY_DIVISOR => Age::Conflicting,
                _ => Age::New,
            },
        };
        let quiet = queue.calls.front().is_some_and(|head| {
            let unchanged = queue.arrived.max(head.alone_since()).elapsed();
            let all_wait = || {
                let mut waiting = shared.process_groups.waiting(shared.stall_check_after);
                waiting.extend(queue.calls.iter().filter_map(|work| work.record.thread));
                shared.callers.all_blocked(&waiting)
            };
            unchanged > within(head) / EARLY_DIVISOR && all_wait()
        });
        let outlook = match queue.calls.front() {
            _ if queue.closed => Outlook::Closed,
            None => other_groups.outlook(shared, queue.arrived),
            Some(_) if quiet && shared.process_groups.all_blocked(shared.stall_check_after) => Outlook::Settled,
            Some(_) => other_groups.unsettled(),
        };
        PendingCalls { calls: queue.calls.iter().map(pending).collect(), outlook, quiet }
    }

    /// Gives up the call at `place`, or, without one, hears about the calls that others give up.
    fn fail_call(
        &mut self,
        queue: &mut Queue<'_>,
        head: &Arc<Work>,
        place: Option<usize>,
        other_groups: &OtherGroups,
    ) -> Option<(Arc<Work>, Result<()>)> {
        let given_up = place.and_then(|place| queue.calls.remove(place));
        let account = match &given_up {
            Some(work) => {
                self.shared.process_groups.give_up();
                MismatchEntry::Call(&work.call)
            }
            None if head.is_absent() => MismatchEntry::None(other_groups.describe(&self.shared, queue.closed)),
            None => MismatchEntry::None(format!("nothing that matches; it waits for {}", head.call.full_name())),
        };
        let told = self.run_checked::<()>(head, |channel, _, wait_ctx| Err(channel.explain(&account, wait_ctx)));
        Some((given_up?, told))
    }
}
