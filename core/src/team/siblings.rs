//! The teams of one rank, as far as they must know of each other: two ranks may wait for each other in different teams.
//!
//! A thread that has waited long for a call marks the call's step in its team's shared memory ([`Node::stall`]); the failure
//! detector carries the mark to other hosts. Every thread that waits long also looks for such marks of other ranks in all
//! teams of its rank. In a team that has no call for the marked step, the lead then takes part in the step without a call
//! ([`Job::absent`]). That brings all ranks of that team to reconciliation ([`crate::collective::lineup`]), where lists of
//! calls, also empty ones, decide. A rank that waits nowhere does not look, so a slow rank is no mismatch.
//! Thread rule: may be used from any thread.
//!
//! [`Node::stall`]: crate::transport::Node::stall
//! [`Job::absent`]: crate::collective::Job::absent

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::{Duration, Instant};

use super::Shared;
use super::callers::{ThreadId, this_thread};
use crate::error::Error;

/// How long reconciliations of other teams are waited for.
const SETTLED: Duration = Duration::from_secs(2);

/// The teams of one rank.
#[derive(Default)]
pub struct Siblings {
    teams: Mutex<Vec<Weak<Shared>>>,
    /// Threads that wait for calls which did not block, outside of the core, and since when.
    blocked: Mutex<Vec<(ThreadId, Instant)>>,
    /// A thread that may call at any time, even if it has not done so yet; 0 for none.
    main: ThreadId,
    /// How many calls of this rank were given up because the ranks called different things.
    given_up: AtomicU64,
}

impl Siblings {
    /// For a process whose main thread may call at any time.
    pub fn of_process() -> Siblings {
        Siblings { main: rustix::process::getpid().as_raw_nonzero().get(), ..Siblings::default() }
    }

    pub(super) fn add(&self, team: &Arc<Shared>) {
        let mut teams = lock(&self.teams);
        teams.retain(|team| team.strong_count() > 0);
        teams.push(Arc::downgrade(team));
    }

    fn teams(&self) -> Vec<Arc<Shared>> {
        lock(&self.teams).iter().filter_map(Weak::upgrade).collect()
    }

    fn others(&self, own: &Shared) -> impl Iterator<Item = Arc<Shared>> {
        let own = std::ptr::from_ref(own);
        self.teams().into_iter().filter(move |team| !std::ptr::eq(Arc::as_ptr(team), own))
    }

    /// Lets this rank's other teams take part in steps in which other ranks wait long; called by a thread that waits long.
    pub(super) fn look(&self, own: &Shared) {
        self.others(own).for_each(|team| team.attend_stalled());
    }

    /// The threads of this rank that have waited for calls, in whatever team, for at least `long`. A call that has come just
    /// now may be about to meet its counterpart.
    pub(super) fn waiting(&self, long: Duration) -> Vec<ThreadId> {
        let blocked = lock(&self.blocked);
        let old = blocked.iter().filter(|(_, since)| since.elapsed() >= long);
        let mut threads: Vec<ThreadId> = old.map(|(thread, _)| *thread).collect();
        drop(blocked);
        for team in self.teams() {
            let pending = team.recorder.pending();
            let old = pending.iter().filter(|record| record.submitted.elapsed() >= long);
            threads.extend(old.filter_map(|record| record.thread));
        }
        threads
    }

    /// What this rank has waited for in other teams than `own` for at least `long`: the oldest call's heading.
    pub(super) fn pending_elsewhere(&self, own: &Shared, long: Duration) -> Option<String> {
        let waits = |team: Arc<Shared>| team.recorder.pending();
        let oldest = self.others(own).flat_map(waits).min_by_key(|record| record.submitted)?;
        (oldest.submitted.elapsed() >= long).then(|| oldest.brief.heading.clone())
    }

    /// Whether every thread that has called any team, and the main thread, has waited for a call for at least `long`.
    pub(super) fn all_wait(&self, long: Duration) -> bool {
        let waiting = self.waiting(long);
        let main = self.main == 0 || waiting.contains(&self.main);
        main && self.teams().iter().all(|team| team.callers.all_wait(&waiting))
    }

    /// Whether another team than `own` reconciles its calls.
    pub(super) fn reconcile_elsewhere(&self, own: &Shared) -> bool {
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
            if let Some(record) = team.recorder.pending().first() {
                let words = format!("{} was interrupted by a signal on {}", record.brief.heading, team.me());
                team.fail(&Error::PeerLost(words));
            }
        }
    }

    /// This thread waits, until the guard goes, for a call that it has started and that did not block.
    pub fn blocked(self: &Arc<Siblings>) -> Blocked {
        let thread = this_thread();
        lock(&self.blocked).push((thread, Instant::now()));
        Blocked { siblings: Arc::clone(self), thread }
    }

    /// Waits a while until reconciliations of other teams than `own` have ended: the other ranks then learn of the mismatch, and
    /// not of what this rank does after it has learned of it.
    pub(super) fn settle(&self, own: &Shared) {
        let until = Instant::now() + SETTLED;
        let reconcile = || self.others(own).any(|team| team.reconciles() || team.attends());
        while reconcile() && Instant::now() < until {
            std::thread::sleep(Duration::from_millis(2));
        }
    }
}

/// See [`Siblings::blocked`].
pub struct Blocked {
    siblings: Arc<Siblings>,
    thread: ThreadId,
}

impl Drop for Blocked {
    fn drop(&mut self) {
        let mut blocked = lock(&self.siblings.blocked);
        if let Some(place) = blocked.iter().position(|(thread, _)| *thread == self.thread) {
            blocked.swap_remove(place);
        }
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
