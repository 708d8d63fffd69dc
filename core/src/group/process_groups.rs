//! The teams of one rank, as far as they must know of each other: two ranks may wait for each other in different teams.
//!
//! A thread that has waited long for a call marks the call's step in its team's shared memory ([`ShmRegion::stall`]); the failure
//! detector carries the mark to other hosts. Every thread that waits long also looks for such marks of other ranks in all
//! teams of its rank. In a team that has no call for the marked step, the lead then takes part in the step without a call
//! ([`Call::absent`]). That brings all ranks of that team to reconciliation ([`crate::collective::lineup`]), where lists of
//! calls, also empty ones, decide. A rank that waits nowhere does not look, so a slow rank is no mismatch.
//! Thread rule: may be used from any thread.
//!
//! [`ShmRegion::stall`]: crate::transport::Node::stall
//! [`Call::absent`]: crate::collective::Job::absent

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::{Duration, Instant};

use super::callers::{ThreadId, this_thread};
use super::record::Record;

/// How long reconciliations of other teams are waited for.
const SETTLED: Duration = Duration::from_secs(2);

/// A group, seen by the other groups of its process.
pub(super) trait WaitingGroup: Send + Sync {
    /// Lets the group take part, without a call, in a step in which other ranks wait.
    fn join_stalled(&self);
    /// Its calls that have not ended, oldest first.
    fn pending(&self) -> Vec<Arc<Record>>;
    /// Whether every live thread that has called it is among `waiting`.
    fn callers_are_among(&self, waiting: &[ThreadId]) -> bool;
    /// Whether it reconciles its calls with the other ranks.
    fn reconciles(&self) -> bool;
    /// Whether it takes part in a step without a call.
    fn joins_stalled(&self) -> bool;
    /// Fails: a signal has interrupted the caller of `call`.
    fn interrupt(&self, call: &Record);
}

/// The groups of one process.
#[derive(Default)]
pub struct ProcessGroups {
    teams: Mutex<Vec<Weak<dyn WaitingGroup>>>,
    /// Threads that wait for calls which did not block, outside of the core, and since when.
    blocked: Mutex<Vec<(ThreadId, Instant)>>,
    /// A thread that may call at any time, even if it has not done so yet; 0 for none.
    main: ThreadId,
    /// How many calls of this rank were given up because the ranks called different things.
    given_up: AtomicU64,
}

impl ProcessGroups {
    /// For a process whose main thread may call at any time.
    pub fn of_process() -> ProcessGroups {
        ProcessGroups { main: rustix::process::getpid().as_raw_nonzero().get(), ..ProcessGroups::default() }
    }

    pub(super) fn add(&self, team: Arc<dyn WaitingGroup>) {
        let mut teams = lock(&self.teams);
        teams.retain(|team| team.strong_count() > 0);
        teams.push(Arc::downgrade(&team));
    }

    fn teams(&self) -> Vec<Arc<dyn WaitingGroup>> {
        lock(&self.teams).iter().filter_map(Weak::upgrade).collect()
    }

    fn others(&self, own: &dyn WaitingGroup) -> impl Iterator<Item = Arc<dyn WaitingGroup>> {
        let own: *const () = std::ptr::from_ref(own).cast();
        self.teams().into_iter().filter(move |team| !std::ptr::addr_eq(Arc::as_ptr(team), own))
    }

    /// Lets this rank's other teams take part in steps in which other ranks wait long; called by a thread that waits long.
    pub(super) fn check_deadlock(&self, own: &dyn WaitingGroup) {
        self.others(own).for_each(|team| team.join_stalled());
    }

    /// The threads of this rank that have waited for calls, in whatever team, for at least `long`. A call that has come just
    /// now may be about to meet its counterpart.
    pub(super) fn waiting(&self, long: Duration) -> Vec<ThreadId> {
        let blocked = lock(&self.blocked);
        let old = blocked.iter().filter(|(_, since)| since.elapsed() >= long);
        let mut threads: Vec<ThreadId> = old.map(|(thread, _)| *thread).collect();
        drop(blocked);
        for team in self.teams() {
            let pending = team.pending();
            let old = pending.iter().filter(|record| record.submitted.elapsed() >= long);
            threads.extend(old.filter_map(|record| record.thread));
        }
        threads
    }

    /// What this rank has waited for in other teams than `own` for at least `long`: the oldest call's heading.
    pub(super) fn pending_elsewhere(&self, own: &dyn WaitingGroup, long: Duration) -> Option<String> {
        let waits = |team: Arc<dyn WaitingGroup>| team.pending();
        let oldest = self.others(own).flat_map(waits).min_by_key(|record| record.submitted)?;
        (oldest.submitted.elapsed() >= long).then(|| oldest.summary.name_line.clone())
    }

    /// Whether every thread that has called any team, and the main thread, has waited for a call for at least `long`.
    pub(super) fn all_blocked(&self, long: Duration) -> bool {
        let waiting = self.waiting(long);
        let main = self.main == 0 || waiting.contains(&self.main);
        main && self.teams().iter().all(|team| team.callers_are_among(&waiting))
    }

    /// Whether another team than `own` reconciles its calls.
    pub(super) fn reconcile_elsewhere(&self, own: &dyn WaitingGroup) -> bool {
        self.others(own).any(|team| team.reconciles())
    }

    /// Counts a call that was given up because the ranks called different things.
    pub(super) fn give_up(&self) {
        self.given_up.fetch_add(1, Ordering::AcqRel);
    }

    pub(super) fn given_up(&self) -> u64 {
        self.given_up.load(Ordering::Acquire)
    }

    /// Ends the teams in which calls of this rank have not ended, because a signal has interrupted their caller.
    pub fn interrupt(&self) {
        for team in self.teams() {
            team.pending().first().into_iter().for_each(|call| team.interrupt(call));
        }
    }

    /// This thread waits, until the guard goes, for a call that it has started and that did not block.
    pub fn blocked(self: &Arc<ProcessGroups>) -> BlockedCaller {
        let thread = this_thread();
        lock(&self.blocked).push((thread, Instant::now()));
        BlockedCaller { process_groups: Arc::clone(self), thread }
    }

    /// Waits a while until reconciliations of other teams than `own` have ended: the other ranks then learn of the mismatch, and
    /// not of what this rank does after it has learned of it.
    pub(super) fn settle(&self, own: &dyn WaitingGroup) {
        let until = Instant::now() + SETTLED;
        let reconcile = || self.others(own).any(|team| team.reconciles() || team.joins_stalled());
        while reconcile() && Instant::now() < until {
            std::thread::sleep(Duration::from_millis(2));
        }
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
        if let Some(place) = blocked.iter().position(|(thread, _)| *thread == self.thread) {
            blocked.swap_remove(place);
        }
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
