//! The state that the threads of a group share.
//!
//! Thread rule: any thread.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use super::active::Active;
use super::callers::{CallerThreads, Origin, ThreadId};
use super::gpu_state::GpuState;
use super::group_deadline::GroupDeadline;
use super::process_groups::{ProcessGroups, WaitingGroup};
use super::queue::QueueItem;
use super::record::Record;
use super::recorder::{Recorder, Submission};
use super::thread::GroupThread;
use super::work::{OnComplete, Role, Timeout, Work};
use crate::collective::{Call, CallConfig};
use crate::error::Error;
use crate::group_config::GroupConfig;
use crate::group_key::Members;
use crate::signals;
use crate::transport::ShmRegion;

/// How often a rank that waits for no other rank looks for lost ones.
pub(super) const LOOK_EVERY: Duration = Duration::from_millis(100);

/// Called with a message about a stall, and about the failure that ended the group.
pub type OnFailure = Arc<dyn Fn(&str) + Send + Sync>;

/// See the module's documentation.
pub(super) struct GroupState {
    /// A number of the group in this process: from 1, never used again.
    pub number: u64,
    pub config: CallConfig,
    pub members: Members,
    pub settings: GroupConfig,
    pub region: Arc<ShmRegion>,
    /// With several hosts, threads also wait where the region does not check for lost ranks.
    pub several_hosts: bool,
    pub rank: usize,
    /// The names of all ranks.
    pub names: Arc<[String]>,
    pub failure: OnceLock<Error>,
    pub on_failure: OnFailure,
    pub recorder: Arc<Recorder>,
    pub callers: CallerThreads,
    pub process_groups: Arc<ProcessGroups>,
    /// Runs the calls that no caller runs ([`super::lead`]). Set once.
    pub lead_thread: OnceLock<GroupThread<QueueItem>>,
    /// Wait of a call after which its thread checks for deadlocks across groups.
    pub stall_check_after: Duration,
    /// Whether the group's thread reconciles calls.
    pub reconciling: Active,
    /// Whether it does, and some rank has no call.
    pub lacks_calls: AtomicBool,
    /// Whether the group's thread takes part in a round without a call, and in the reconciliation after it.
    pub joining_stalled: Active,
    /// The last stalled round that the group's thread was asked to join, plus 1; 0 for none.
    pub joined_round: AtomicU64,
    /// The number of matched calls.
    pub matched: AtomicU64,
    /// Above the number on this rank of each of them.
    pub matched_below: AtomicU64,
    pub deadline: GroupDeadline,
    pub gpu: GpuState,
    /// When a client of the group last looked for lost ranks, in milliseconds of [`crate::clock::coarse_now`].
    pub looked_for_lost: AtomicU64,
}

impl GroupState {
    /// The first failure that ended the group, here or on another rank of the host.
    pub fn failure(&self) -> Option<Error> {
        if let Some(error) = self.failure.get() {
            return Some(error.clone());
        }
        let error = self.region.control().failure()?;
        self.fail(&error);
        Some(error)
    }

    /// Whether the group has ended, here or on another rank of the host. Quick.
    pub fn has_failed(&self) -> bool {
        self.failure.get().is_some() || self.region.control().has_failed()
    }

    /// As [`GroupState::failure`], but without calling `on_failure` for a failure of another rank. For dumps, which
    /// `on_failure` writes.
    pub fn known_failure(&self) -> Option<Error> {
        self.failure.get().cloned().or_else(|| self.region.control().failure())
    }

    /// Ends the group with `error`, on this rank and the others of the host.
    pub fn fail(&self, error: &Error) {
        if self.set_failure(error) {
            (self.on_failure)(&error.to_string());
        }
    }

    /// As `fail`, without calling `on_failure`; false if the group had already failed.
    pub fn set_failure(&self, error: &Error) -> bool {
        // Peers may still access the memory of the group, which its owner may free as soon as it sees the failure.
        if let Some(memory) = self.region.peer_memory() {
            memory.quarantine();
        }
        let first = self.failure.set(error.clone()).is_ok();
        if first {
            self.region.set_failure(error);
        }
        first
    }

    /// The reason to abort a wait for `head`, if any: the group has failed, or the deadline of a later call has passed.
    /// Also checks for deadlocks across groups.
    pub fn abort_reason(&self, head: &Work) -> Option<Error> {
        if signals::interrupted() {
            return Some(Error::PeerLost(format!(
                "{} was interrupted by a signal on {}",
                head.call.full_name(),
                self.rank_name()
            )));
        }
        if head.is_absent() {
            if self.closing() && !self.reconciles() {
                return Some(self.ended());
            }
        } else {
            self.check_deadlock(&head.record);
        }
        let other_groups = || if self.several_hosts { self.lost_rank() } else { None };
        self.failure().or_else(other_groups).or_else(|| {
            // A helper may run its part of the head before the head counts as started.
            let behind = self.recorder.overdue().filter(|behind| !Arc::ptr_eq(behind, &head.record))?;
            Some(Error::Timeout(format!(
                "{} was not complete after {:.1} s ({}); it is behind {}, which waits for other ranks",
                behind.summary.name_line,
                behind.submitted.elapsed().as_secs_f64(),
                behind.deadline.set_by,
                head.call.full_name()
            )))
        })
    }

    /// If `oldest` has waited long: looks for deadlocks across groups.
    pub fn check_deadlock(&self, oldest: &Record) {
        if oldest.submitted.elapsed() > self.stall_check_after {
            self.region.control().stall(self.region.waiting_round());
            self.process_groups.check_deadlock(self);
        }
    }

    /// The error of calls after the end of the group.
    pub fn ended(&self) -> Error {
        Error::State(format!("{} has ended", self.config.key.name()))
    }

    /// The name of this rank.
    pub fn rank_name(&self) -> &str {
        &self.names[self.rank]
    }

    /// A lost or departed rank, for a wait on another host, where that rank may be.
    pub fn lost_rank(&self) -> Option<Error> {
        let departed = || {
            let rank = self.region.departed()?;
            let name = self.names.get(rank).cloned().unwrap_or_else(|| format!("rank {rank}"));
            Some(Error::PeerLost(format!("{name} {}", self.config.key.name().departure())))
        };
        self.region.lost_rank().or_else(departed)
    }

    /// Sends the group's thread an item; returns the item if the group is closing. If the system refuses a thread, the
    /// group fails, because other ranks wait.
    pub fn send(&self, item: QueueItem) -> Option<QueueItem> {
        let (item, reason) = match self.lead_thread.get() {
            Some(thread) => thread.send(item).err()?,
            None => (item, None),
        };
        reason.iter().for_each(|error| self.fail(error));
        Some(item)
    }

    pub fn closing(&self) -> bool {
        self.lead_thread.get().is_none_or(GroupThread::is_closed)
    }

    pub fn reconciles(&self) -> bool {
        self.reconciling.goes_on()
    }

    /// The round of channel 0 in which another rank is stalled, if it is the next round of this rank.
    pub fn stalled_round(&self) -> Option<u32> {
        self.region.control().stalled().filter(|&round| round == self.region.round().wrapping_add(1))
    }

    /// Counts a matched call, which has this number on this rank, and returns its index, from 1. Only for the leader.
    pub fn next_match_index(&self, number: u64) -> u64 {
        let match_index = self.matched() + 1;
        self.matched.store(match_index, Ordering::Relaxed);
        // Calls by name match in any order.
        if self.matched_below.load(Ordering::Relaxed) <= number {
            self.matched_below.store(number + 1, Ordering::Relaxed);
        }
        match_index
    }

    pub fn matched(&self) -> u64 {
        self.matched.load(Ordering::Relaxed)
    }

    /// The work of a call of this rank, which is submitted now without an earlier `submission`. `origin`: who has
    /// made it.
    pub fn work(
        &self,
        call: Call,
        role: Role,
        submission: Option<Submission>,
        origin: Origin,
        timeout: Timeout,
        done: OnComplete,
    ) -> Work {
        let deadline = self.deadline.of(timeout);
        let record = self.recorder.open(&call, submission, deadline, origin);
        Work::new(call, role, done, deadline, record, Arc::clone(&self.recorder))
    }
}

impl WaitingGroup for GroupState {
    fn join_stalled(&self) {
        let Some(round) = self.stalled_round().map(|round| u64::from(round) + 1) else { return };
        if self.joined_round.swap(round, Ordering::AcqRel) != round {
            // A group that is closing joins no more rounds.
            let _refused = self.send(QueueItem::JoinStalled);
        }
    }

    fn pending(&self) -> Vec<Arc<Record>> {
        self.recorder.pending()
    }

    fn next_number(&self) -> u64 {
        self.recorder.next_number()
    }

    fn matched_below(&self) -> u64 {
        self.matched_below.load(Ordering::Relaxed)
    }

    fn callers_are_among(&self, waiting: &[ThreadId], is_idle: bool) -> bool {
        let has_ended = || self.recorder.pending().iter().all(|record| record.origin != Origin::Pool);
        self.callers.all_blocked(waiting) && (!self.callers.include_pools() || is_idle && has_ended())
    }

    fn reconciles(&self) -> bool {
        self.reconciles()
    }

    fn lacks_calls(&self) -> bool {
        self.lacks_calls.load(Ordering::Acquire)
    }

    fn joins_stalled(&self) -> bool {
        self.joining_stalled.goes_on()
    }

    fn interrupt(&self, call: &Record) {
        let text = format!("{} was interrupted by a signal on {}", call.summary.name_line, self.rank_name());
        self.fail(&Error::PeerLost(text));
    }
}
