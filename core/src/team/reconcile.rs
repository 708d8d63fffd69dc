//! What the lead does when the ranks met with different calls: they tell each other their lists of calls, until it is known
//! which calls are carried out next, or given up ([`crate::collective::lineup`]).
//!
//! Thread rule: as for [`Worker`].

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use super::call::Call;
use super::elsewhere::Elsewhere;
use super::worker::{Queue, Worker};
use crate::collective::Account;
use crate::collective::lineup::{Age, Decision, List, Outlook, Pending};
use crate::error::{Error, Result};

/// The longest that the lead looks away from the other ranks meanwhile: a call that all ranks have is found within it.
pub(super) const LONGEST_NAP: Duration = Duration::from_millis(20);
/// How much sooner a call is given up when nothing else can come.
pub(super) const SOONER: u32 = 30;

impl Worker {
    /// The ranks met with different calls: brings those that all have to the front of the queue, or gives one up, once it
    /// is known which; returns a call of this rank that has ended so. `absent` stands for the calls of a rank that has none.
    pub fn line_up(
        &mut self,
        queue: &mut Queue<'_>,
        absent: Option<&Arc<Call>>,
        elsewhere: Elsewhere,
    ) -> Option<(Arc<Call>, Result<()>)> {
        self.shared.reconciles.store(true, Ordering::Release);
        let ended = self.reconcile(queue, absent, elsewhere);
        self.shared.reconciles.store(false, Ordering::Release);
        if let Some((_, Err(Error::Mismatch(_)))) = &ended {
            self.shared.siblings.settle(&self.shared);
        }
        ended
    }

    fn reconcile(
        &mut self,
        queue: &mut Queue<'_>,
        absent: Option<&Arc<Call>>,
        mut elsewhere: Elsewhere,
    ) -> Option<(Arc<Call>, Result<()>)> {
        let mut nap = Duration::from_millis(1);
        loop {
            queue.take();
            if queue.calls.is_empty() {
                elsewhere.look(&self.shared);
            }
            let list = self.list(queue, &elsewhere);
            let head = Arc::clone(queue.calls.front().or(absent)?);
            let own = self.rank;
            let decision = self.attempt(&head, |channel, _, patience| {
                let decision = channel.line_up(&list, patience)?;
                if let Decision::Wait(ranks) = &decision {
                    // The rounds themselves do not wait for what is missing.
                    let counterpart = || {
                        let others = ranks.iter().enumerate().filter(|(rank, _)| *rank != own);
                        let words = others.map(|(rank, standing)| format!("rank {rank} {}", standing.words()));
                        format!("its counterpart; {}", words.collect::<Vec<_>>().join(", "))
                    };
                    patience.check(Duration::ZERO, &counterpart)?;
                }
                Ok(decision)
            });
            match decision {
                Ok(Decision::Run(order)) => {
                    queue.reorder(&order);
                    return None;
                }
                Ok(Decision::GiveUp(places)) => return self.give_up(queue, &head, places[self.rank], &elsewhere),
                Ok(Decision::Wait(_)) => {
                    nap = if queue.nap(nap) { Duration::from_millis(1) } else { (2 * nap).min(LONGEST_NAP) };
                }
                Err(error) => return queue.calls.pop_front().map(|head| (head, Err(error))),
            }
        }
    }

    /// What this rank tells of its calls.
    fn list(&self, queue: &Queue<'_>, elsewhere: &Elsewhere) -> List {
        let shared = &self.shared;
        // Before the deadline, so that what differs is told rather than that time is up.
        let within = |call: &Call| {
            call.timeout.map_or(shared.settings.match_within, |timeout| shared.settings.match_within.min(timeout / 3))
        };
        let pending = |call: &Arc<Call>| Pending {
            signature: call.job.signature,
            key: call.job.key(),
            age: match call.alone_since().elapsed() {
                alone if alone > within(call) => Age::Stale,
                alone if alone > within(call) / SOONER => Age::Ripe,
                _ => Age::Fresh,
            },
        };
        let quiet = queue.calls.front().is_some_and(|head| {
            let unchanged = queue.arrived.max(head.alone_since()).elapsed();
            let all_wait = || {
                let mut waiting = shared.siblings.waiting(shared.long);
                waiting.extend(queue.calls.iter().filter_map(|call| call.record.thread));
                shared.callers.all_wait(&waiting)
            };
            unchanged > within(head) / SOONER && all_wait()
        });
        let outlook = match queue.calls.front() {
            _ if queue.closed => Outlook::Closed,
            None => elsewhere.outlook(shared, queue.arrived),
            Some(_) if quiet && shared.siblings.all_wait(shared.long) => Outlook::Settled,
            Some(_) => elsewhere.unsettled(),
        };
        List { calls: queue.calls.iter().map(pending).collect(), outlook, quiet }
    }

    /// Gives up the call at `place`, or, without one, hears about the calls that others give up.
    fn give_up(
        &mut self,
        queue: &mut Queue<'_>,
        head: &Arc<Call>,
        place: Option<usize>,
        elsewhere: &Elsewhere,
    ) -> Option<(Arc<Call>, Result<()>)> {
        let given_up = place.and_then(|place| queue.calls.remove(place));
        let account = match &given_up {
            Some(call) => {
                self.shared.siblings.give_up();
                Account::Call(&call.job)
            }
            None if head.is_absent() => Account::None(elsewhere.words(&self.shared, queue.closed)),
            None => Account::None(format!("nothing that matches; it waits for {}", head.job.title())),
        };
        let told = self.attempt::<()>(head, |channel, _, patience| Err(channel.explain(&account, patience)));
        Some((given_up?, told))
    }
}
