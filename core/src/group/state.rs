//! What the threads of a group share.
//!
//! Thread rule: any thread.

use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::mpsc::Sender;
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::time::Duration;

use serde_json::Value;

use super::callers::{CallerThreads, ThreadId};
use super::process_groups::{ProcessGroups, WaitingGroup};
use super::record::{Record, Recorder};
use super::work::{QueueItem, Work};
use crate::collective::AlgorithmSetting;
use crate::collective::device::DeviceSettings;
use crate::error::Error;
use crate::signals;
use crate::transport::ShmRegion;

/// The settings of a team.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct GroupConfig {
    /// Its number; -1 is the control team.
    pub id: i32,
    /// Whether floating point is added up in float64.
    pub acc_f64: bool,
    /// How it averages between hosts.
    pub algorithm: AlgorithmSetting,
    /// The longest that a call may take.
    pub timeout: Option<Duration>,
    /// After how long a wait names who is late.
    pub stall_warn: Option<Duration>,
    /// How long ranks that hold different calls wait for a counterpart to be submitted; a thirtieth of it where every
    /// caller waits for its call already.
    pub match_timeout: Duration,
    /// How calls on device memory are carried.
    pub device: DeviceSettings,
}

/// Told, in words, of what a team's user should look into: a stall, and the failure that ended it.
pub type OnFailure = Arc<dyn Fn(&str) + Send + Sync>;

/// What the team's threads share.
pub(super) struct GroupState {
    pub settings: GroupConfig,
    pub region: Arc<ShmRegion>,
    /// Then threads wait for other hosts too, where the region does not look.
    pub several_hosts: bool,
    pub rank: usize,
    /// The names of all ranks.
    pub names: Arc<[String]>,
    pub failure: OnceLock<Error>,
    pub on_failure: OnFailure,
    pub recorder: Arc<Recorder>,
    pub callers: CallerThreads,
    pub process_groups: Arc<ProcessGroups>,
    /// What the thread that leads is given; none when the team is about to end.
    pub queue: Mutex<Option<Sender<QueueItem>>>,
    /// Calls have waited so long when they look whether the ranks wait for each other.
    pub stall_check_after: Duration,
    /// Whether the lead is reconciling calls with the other ranks.
    pub is_reconciling: AtomicBool,
    /// Whether the lead takes part in a step without a call, and in what follows.
    pub joins_stalled: AtomicBool,
    /// The last step for which the lead was told to take part without a call.
    pub joined_seq: AtomicU64,
    /// The number of calls that all ranks have matched.
    pub matched: AtomicU64,
    /// The deadline of calls in nanoseconds; 0 for none.
    pub timeout: AtomicU64,
    /// What is known of the way that calls on device memory take, after the first.
    pub gpu_info: OnceLock<Value>,
    /// The bytes of device memory that the team has taken.
    pub device_bytes: AtomicUsize,
    /// How many calls on device memory went in chunks, because a rank could not open the memory of another.
    pub calls_in_chunks: AtomicUsize,
}

impl GroupState {
    /// The first failure that ended the team, here or on another rank of the host.
    pub fn failure(&self) -> Option<Error> {
        if let Some(error) = self.failure.get() {
            return Some(error.clone());
        }
        let error = self.region.failure()?;
        self.fail(&error);
        Some(error)
    }

    /// The failure that ended the team, here or on another rank of the host, without the alarm that [`Shared::failure`]
    /// raises for one of which this rank had not heard: a dump, which an alarm writes, asks for it.
    pub fn known_failure(&self) -> Option<Error> {
        self.failure.get().cloned().or_else(|| self.region.failure())
    }

    /// Ends the team for `error`, on this rank and the others of the host.
    pub fn fail(&self, error: &Error) {
        if self.end(error) {
            (self.on_failure)(&error.to_string());
        }
    }

    /// The same without the alarm; false when the team had failed before.
    pub fn end(&self, error: &Error) -> bool {
        // Other ranks may still be at work on memory that they see. Its owner may free it as soon as it hears of the failure.
        if let Some(memory) = self.region.shared() {
            memory.quarantine();
        }
        let first = self.failure.set(error.clone()).is_ok();
        if first {
            self.region.set_failure(error);
        }
        first
    }

    /// Why a wait for `head` should end before its own time: the team has failed, or a call behind it is out of time. Looks
    /// also whether the ranks wait for each other in different teams.
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
                return Some(Error::State("the team has ended".into()));
            }
        } else if head.record.submitted.elapsed() > self.stall_check_after {
            self.region.stall(self.region.step());
            self.process_groups.check_deadlock(self);
        }
        let other_groups = || if self.several_hosts { self.lost_rank() } else { None };
        self.failure().or_else(other_groups).or_else(|| {
            let behind = self.recorder.overdue()?;
            Some(Error::Timeout(format!(
                "{} was not complete after {:.1} s (DL_COMM_TIMEOUT_S); it is behind {}, which waits for other ranks",
                behind.summary.name_line,
                behind.submitted.elapsed().as_secs_f64(),
                head.call.full_name()
            )))
        })
    }

    /// The name of this rank.
    pub fn rank_name(&self) -> &str {
        &self.names[self.rank]
    }

    /// A rank that this one would wait for in vain while it waits for another host, which may be one of that host.
    pub fn lost_rank(&self) -> Option<Error> {
        let left = || {
            let rank = self.region.departed()?;
            let name = self.names.get(rank).cloned().unwrap_or_else(|| format!("rank {rank}"));
            Some(Error::PeerLost(format!("{name} has called finalize")))
        };
        self.region.lost_rank().or_else(left)
    }

    /// Sends the thread that leads a note; returns it when the team is about to end.
    pub fn send(&self, note: QueueItem) -> Option<QueueItem> {
        match &*self.queue.lock().unwrap_or_else(PoisonError::into_inner) {
            Some(queue) => queue.send(note).err().map(|refused| refused.0),
            None => Some(note),
        }
    }

    pub fn closing(&self) -> bool {
        self.queue.lock().unwrap_or_else(PoisonError::into_inner).is_none()
    }

    pub fn reconciles(&self) -> bool {
        self.is_reconciling.load(Ordering::Acquire)
    }

    pub fn attends(&self) -> bool {
        self.joins_stalled.load(Ordering::Acquire)
    }

    /// The step of channel 0 in which another rank waits long, and this one has not come to.
    pub fn stalled_seq(&self) -> Option<u32> {
        self.region.stalled().filter(|&step| step == self.region.step().wrapping_add(1))
    }

    /// Lets the lead take part in a step in which other ranks wait long, once.
    pub fn join_stalled(&self) {
        let Some(step) = self.stalled_seq().map(|step| u64::from(step) + 1) else { return };
        if self.joined_seq.swap(step, Ordering::AcqRel) != step {
            // A team that is about to end attends nothing any more.
            let _refused = self.send(QueueItem::JoinStalled);
        }
    }

    /// Counts a call that the ranks have matched; returns its place, from 1. For who has the executor.
    pub fn next_match_index(&self) -> u64 {
        let place = self.matched() + 1;
        self.matched.store(place, Ordering::Relaxed);
        place
    }

    pub fn matched(&self) -> u64 {
        self.matched.load(Ordering::Relaxed)
    }

    pub fn timeout(&self) -> Option<Duration> {
        Some(self.timeout.load(Ordering::Relaxed)).filter(|&nanos| nanos > 0).map(Duration::from_nanos)
    }

    pub fn set_timeout(&self, timeout: Option<Duration>) {
        let nanos = timeout.map_or(0, |timeout| u64::try_from(timeout.as_nanos()).unwrap_or(u64::MAX));
        self.timeout.store(nanos, Ordering::Relaxed);
    }
}

impl WaitingGroup for GroupState {
    fn join_stalled(&self) {
        self.join_stalled();
    }

    fn pending(&self) -> Vec<Arc<Record>> {
        self.recorder.pending()
    }

    fn callers_are_among(&self, waiting: &[ThreadId]) -> bool {
        self.callers.all_blocked(waiting)
    }

    fn reconciles(&self) -> bool {
        self.reconciles()
    }

    fn joins_stalled(&self) -> bool {
        self.attends()
    }

    fn interrupt(&self, call: &Record) {
        let text = format!("{} was interrupted by a signal on {}", call.summary.name_line, self.rank_name());
        self.fail(&Error::PeerLost(text));
    }
}
