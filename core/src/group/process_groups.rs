//! The groups of one process, for deadlocks across groups: two ranks may wait for each other in different groups.
//!
//! A thread that has waited long for a call marks the call's round as stalled in its group's shared memory
//! ([`ShmRegion::stall`]). The failure detector forwards the mark to other hosts. Such a thread also checks all groups
//! of its rank for marks of other ranks. If a group has no call for the marked round, its lead takes part in the round
//! without a call ([`Call::absent`]). So all ranks of that group start a reconciliation
//! ([`crate::collective::matching`]), which also handles empty lists. A rank that is not blocked does not check, so a
//! slow rank is no mismatch.
//! Thread rule: any thread.
//!
//! [`ShmRegion::stall`]: crate::transport::ShmRegion::stall
//! [`Call::absent`]: crate::collective::Call::absent

use std::any::Any;
use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, Weak};
use std::time::{Duration, Instant};

use super::callers::{Caller, CallerThreads, ThreadId, this_thread};
use super::record::Record;
use crate::lock::lock;
use crate::transport::Calls;

/// Maximum wait for reconciliations of other groups.
const SETTLE_TIMEOUT: Duration = Duration::from_secs(2);

/// A group, seen by the other groups of its process.
pub(super) trait WaitingGroup: Send + Sync {
    /// Makes the group take part, without a call, in a round in which other ranks are stalled.
    fn join_stalled(&self);
    /// Its calls that have not ended, oldest first.
    fn pending(&self) -> Vec<Arc<Record>>;
    /// The number of its next call.
    fn next_number(&self) -> u64;
    /// Those of its calls that have matched have numbers below this one.
    fn matched_below(&self) -> u64;
    /// Whether every live thread that has called it is in `waiting`. Threads of pools are blocked if all their calls have
    /// ended and the process is idle.
    fn callers_are_among(&self, waiting: &[ThreadId], is_idle: bool) -> bool;
    /// Whether it reconciles its calls with the other ranks.
    fn reconciles(&self) -> bool;
    /// Whether it does, and some rank has no call there.
    fn lacks_calls(&self) -> bool;
    /// Whether it takes part in a round without a call.
    fn joins_stalled(&self) -> bool;
    /// Fails the group: a signal has interrupted the caller of `call`.
    fn interrupt(&self, call: &Record);
}

/// The groups of one process.
#[derive(Default)]
pub struct ProcessGroups {
    groups: Mutex<Vec<Weak<dyn WaitingGroup>>>,
    /// Threads that wait for something else than a call of their own.
    blocked: Mutex<Vec<Blocked>>,
    /// The threads that have waited for messages of their own.
    messages: CallerThreads,
    /// A thread that may call at any time, even if it has made no call yet; 0 for none.
    main: ThreadId,
    /// Calls and creations of this rank that failed because ranks waited for each other in different groups.
    failed_calls: AtomicU64,
    /// A call that this rank has refused because of its arguments.
    refused: Mutex<Option<Refused>>,
    /// Ranks of the job that wait for a call of this rank, and that call for messages, by the number of the group.
    awaiting: Mutex<HashMap<u64, (Vec<usize>, String)>>,
}

/// A refused call: why, and the number of the next call of each group.
struct Refused {
    error: String,
    next: Vec<(Weak<dyn WaitingGroup>, u64)>,
}

/// A thread that waits: outside of the core for non-blocking calls, or in the creation of a group or a receive, which it names.
struct Blocked {
    thread: ThreadId,
    since: Instant,
    within: Option<String>,
}

impl ProcessGroups {
    /// For a process whose main thread may call at any time.
    pub fn of_process() -> ProcessGroups {
        ProcessGroups { main: rustix::process::getpid().as_raw_nonzero().get(), ..ProcessGroups::default() }
    }

    pub(super) fn add(&self, group: Arc<dyn WaitingGroup>) {
        let mut groups = lock(&self.groups);
        groups.retain(|group| group.strong_count() > 0);
        groups.push(Arc::downgrade(&group));
    }

    fn groups(&self) -> Vec<Arc<dyn WaitingGroup>> {
        lock(&self.groups).iter().filter_map(Weak::upgrade).collect()
    }

    fn others(&self, own: &dyn WaitingGroup) -> impl Iterator<Item = Arc<dyn WaitingGroup>> {
        let own: *const () = std::ptr::from_ref(own).cast();
        self.groups().into_iter().filter(move |group| !std::ptr::addr_eq(Arc::as_ptr(group), own))
    }

    /// Makes this rank's other groups take part in rounds in which other ranks are stalled. Called by a thread that
    /// waits long.
    pub(super) fn check_deadlock(&self, own: &dyn WaitingGroup) {
        self.others(own).for_each(|group| group.join_stalled());
    }

    /// Threads of this rank that have waited for a call, in any group, for at least `long`. A newer call may be about
    /// to match.
    pub(super) fn waiting(&self, long: Duration) -> Vec<ThreadId> {
        let blocked = lock(&self.blocked);
        let waiting_long = blocked.iter().filter(|blocked| blocked.since.elapsed() >= long);
        let mut threads: Vec<ThreadId> = waiting_long.map(|blocked| blocked.thread).collect();
        drop(blocked);
        for group in self.groups() {
            let pending = group.pending();
            let waiting_long = pending.iter().filter(|record| record.submitted.elapsed() >= long);
            threads.extend(waiting_long.filter_map(|record| record.origin.waiting()));
        }
        threads
    }

    /// The name line of the oldest call in groups other than `own`, or of a creation or receive, if it has waited at least `long`.
    pub(super) fn pending_elsewhere(&self, own: &dyn WaitingGroup, long: Duration) -> Option<String> {
        let pending = |group: Arc<dyn WaitingGroup>| group.pending();
        let oldest = self.others(own).flat_map(pending).min_by_key(|record| record.submitted);
        let call = oldest.map(|record| (record.submitted, record.summary.name_line.clone()));
        let blocked = lock(&self.blocked);
        let others = blocked.iter().filter_map(|blocked| Some((blocked.since, blocked.within.clone()?)));
        let (since, text) = others.chain(call).min_by_key(|(since, _)| *since)?;
        (since.elapsed() >= long).then_some(text)
    }

    /// Notes that this thread waits for messages of its own.
    #[inline]
    pub(super) fn note_waiting_for_messages(&self) {
        self.messages.record(Caller::Waits);
    }

    /// Whether every thread that has called any group, or waited for a message, and the main thread, has waited for a call for at least `long`. As
    /// [`WaitingGroup::callers_are_among`].
    pub(super) fn all_blocked(&self, long: Duration, is_idle: bool) -> bool {
        let waiting = self.waiting(long);
        let main = self.main == 0 || waiting.contains(&self.main);
        main && self.messages.all_blocked(&waiting)
            && self.groups().iter().all(|group| group.callers_are_among(&waiting, is_idle))
    }

    /// Whether another group than `own`, in which this rank waits, lacks calls of some rank. One in which all ranks have
    /// calls waits for no rank; and one that lacks only this rank's does not keep it from going on.
    pub(super) fn lack_calls_elsewhere(&self, own: &dyn WaitingGroup) -> bool {
        self.others(own).any(|group| group.lacks_calls() && !group.pending().is_empty())
    }

    /// Counts a call that failed because ranks waited for each other in different groups.
    pub(super) fn count_failed_call(&self) {
        self.failed_calls.fetch_add(1, Ordering::AcqRel);
    }

    pub(super) fn failed_calls(&self) -> u64 {
        self.failed_calls.load(Ordering::Acquire)
    }

    /// Fails the groups with pending calls of this rank: a signal has interrupted the caller.
    pub fn interrupt(&self) {
        for group in self.groups() {
            group.pending().first().into_iter().for_each(|call| group.interrupt(call));
        }
    }

    /// Marks this thread as waiting for a non-blocking call until the guard is dropped.
    pub fn blocked(self: &Arc<ProcessGroups>) -> BlockedCaller {
        self.blocked_in(None)
    }

    fn blocked_in(self: &Arc<ProcessGroups>, within: Option<String>) -> BlockedCaller {
        let thread = this_thread();
        lock(&self.blocked).push(Blocked { thread, since: Instant::now(), within });
        BlockedCaller { process_groups: Arc::clone(self), thread }
    }

    /// Marks this thread as waiting in the creation of a group, which `what` names, until the guard is dropped.
    pub fn creating(self: &Arc<ProcessGroups>, what: String) -> BlockedCaller {
        self.blocked_in(Some(what))
    }

    /// Notes that this rank has refused a call with this error, which the other ranks may have made.
    pub fn refuse(&self, error: String) {
        let next = self.groups().iter().map(|group| (Arc::downgrade(group), group.next_number())).collect();
        *lock(&self.refused) = Some(Refused { error, next });
    }

    /// Whether it has refused a call, and no call after that one has matched. A group that is gone since may have had some.
    pub(super) fn has_refused(&self) -> bool {
        let groups = self.groups();
        let refused = lock(&self.refused);
        let Some(Refused { next, .. }) = &*refused else { return false };
        let next_of = |group: &Arc<dyn WaitingGroup>| {
            let found = next.iter().find(|(known, _)| std::ptr::addr_eq(known.as_ptr(), Arc::as_ptr(group)));
            found.map_or(0, |(_, next)| *next)
        };
        next.iter().all(|(group, _)| group.strong_count() > 0)
            && groups.iter().all(|group| group.matched_below() <= next_of(group))
    }

    /// The error of the refused call. Forgets it: the calls of the others fail.
    pub(super) fn take_refused(&self) -> Option<String> {
        lock(&self.refused).take().map(|refused| refused.error)
    }

    /// Notes which ranks of the job wait for a call of this rank, in the group number `group`; `call` names it.
    pub(super) fn note_awaiting(&self, group: u64, ranks: Vec<usize>, call: impl FnOnce() -> String) {
        let mut awaiting = lock(&self.awaiting);
        if ranks.is_empty() {
            awaiting.remove(&group)
        } else {
            awaiting.insert(group, (ranks, call()))
        };
    }

    /// Waits up to [`SETTLE_TIMEOUT`] for reconciliations of other groups than `own`. So the other ranks report the
    /// mismatch, and not this rank's reaction to it.
    pub(super) fn settle(&self, own: Option<&dyn WaitingGroup>) {
        let until = Instant::now() + SETTLE_TIMEOUT;
        let groups = || own.map_or_else(|| self.groups(), |own| self.others(own).collect());
        let reconcile = || groups().iter().any(|group| group.reconciles() || group.joins_stalled());
        while reconcile() && Instant::now() < until {
            std::thread::sleep(Duration::from_millis(2));
        }
    }
}

impl Calls for ProcessGroups {
    fn wait_in(self: Arc<Self>, what: String) -> Box<dyn Any> {
        Box::new(self.blocked_in(Some(what)))
    }

    fn look(&self) {
        self.groups().iter().for_each(|group| group.join_stalled());
    }

    fn waiting_for_this_rank(&self) -> HashMap<usize, String> {
        let awaiting = lock(&self.awaiting);
        awaiting.values().flat_map(|(ranks, call)| ranks.iter().map(|&rank| (rank, call.clone()))).collect()
    }

    fn give_up(&self) {
        self.count_failed_call();
    }

    fn settle(&self) {
        ProcessGroups::settle(self, None);
    }
}

/// See [`ProcessGroups::blocked`].
pub struct BlockedCaller {
    process_groups: Arc<ProcessGroups>,
    thread: ThreadId,
}

impl Drop for BlockedCaller {
    fn drop(&mut self) {
        let mut blocked = lock(&self.process_groups.blocked);
        if let Some(position) = blocked.iter().position(|blocked| blocked.thread == self.thread) {
            blocked.swap_remove(position);
        }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    /// A group that has made so many calls, of which those below a number may have matched.
    struct Calls(u64, AtomicU64);

    impl WaitingGroup for Calls {
        fn join_stalled(&self) {}
        fn pending(&self) -> Vec<Arc<Record>> {
            Vec::new()
        }
        fn next_number(&self) -> u64 {
            self.0
        }
        fn matched_below(&self) -> u64 {
            self.1.load(Ordering::Relaxed)
        }
        fn callers_are_among(&self, _waiting: &[ThreadId], _is_idle: bool) -> bool {
            true
        }
        fn reconciles(&self) -> bool {
            false
        }
        fn lacks_calls(&self) -> bool {
            false
        }
        fn joins_stalled(&self) -> bool {
            false
        }
        fn interrupt(&self, _call: &Record) {}
    }

    #[test]
    fn a_refused_call_is_the_last_one_until_a_call_of_any_group_matches() {
        let process = ProcessGroups::default();
        let groups: Vec<Arc<Calls>> =
            [(5, 3), (70, 70)].map(|(made, below)| Arc::new(Calls(made, below.into()))).into();
        groups.iter().for_each(|group| process.add(Arc::clone(group) as Arc<dyn WaitingGroup>));
        assert!(!process.has_refused());
        process.refuse("an array of text".into());
        assert!(process.has_refused());
        groups[0].1.store(5, Ordering::Relaxed);
        assert!(process.has_refused(), "calls before it have matched");
        groups[0].1.store(6, Ordering::Relaxed);
        assert!(!process.has_refused(), "a call after it has matched");
        let [first, second] = <[Arc<Calls>; 2]>::try_from(groups).ok().unwrap();
        first.1.store(0, Ordering::Relaxed);
        assert!(process.has_refused());
        drop(second);
        assert!(!process.has_refused(), "a group may have had calls after it");
        process.refuse("an array of text".into());
        let new = Arc::new(Calls(1, 1.into()));
        process.add(Arc::clone(&new) as Arc<dyn WaitingGroup>);
        assert!(!process.has_refused(), "a call has matched in a new group");
    }
}
