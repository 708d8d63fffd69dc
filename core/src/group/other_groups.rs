//! The activity of this rank in other groups while one group reconciles its calls.
//!
//! Thread rule: used by the leader.

use std::time::{Duration, Instant};

use rustix::time::{ClockId, clock_gettime};

use super::state::GroupState;
use crate::collective::matching::FurtherCalls;

/// See the module's documentation.
pub(super) struct OtherGroups {
    /// Failed calls of this rank in all groups before this reconciliation.
    failed_calls: u64,
    /// The call that this rank waits for, or waited for last.
    pending: Option<String>,
    /// Whether it waits for that call now.
    waits: bool,
    /// Start of the reconciliation: time, and processor time of the process.
    since: (Instant, Duration),
}

/// The processor time of this process.
fn processor_time() -> Duration {
    let time = clock_gettime(ClockId::ProcessCPUTime);
    Duration::new(time.tv_sec.unsigned_abs(), u32::try_from(time.tv_nsec).unwrap_or(0))
}

impl OtherGroups {
    /// At the start of a reconciliation of `group`.
    pub fn new(group: &GroupState) -> OtherGroups {
        let since = (Instant::now(), processor_time());
        let mut other_groups =
            OtherGroups { failed_calls: group.process_groups.failed_calls(), pending: None, waits: false, since };
        other_groups.poll(group);
        other_groups
    }

    /// Updates the pending call.
    pub fn poll(&mut self, group: &GroupState) {
        let pending = group.process_groups.pending_elsewhere(group, group.stall_check_after);
        self.waits = pending.is_some();
        self.pending = pending.or(self.pending.take());
    }

    /// Whether this rank may make further calls, if it waits for some call, but may have threads that do not wait.
    /// Only the processor time shows that: waits and reconciliation take far less than a tenth of a processor.
    pub fn unsettled(&self) -> FurtherCalls {
        if self.computes() { FurtherCalls::Busy } else { FurtherCalls::Open }
    }

    fn computes(&self) -> bool {
        let (started, before) = self.since;
        processor_time().saturating_sub(before) > started.elapsed() / 10
    }

    /// Whether the process has computed nothing for a while.
    pub fn is_idle(&self, group: &GroupState) -> bool {
        self.since.0.elapsed() > group.stall_check_after && !self.computes()
    }

    /// Whether this rank may make further calls in `group`, whose last call came at `arrived`.
    pub fn further_calls(&self, group: &GroupState, arrived: Instant) -> FurtherCalls {
        let process_groups = &group.process_groups;
        if self.pending.is_some() && process_groups.failed_calls() > self.failed_calls {
            // The call in the other group failed because the two groups' ranks wait for each other. So this rank has no
            // further call here either.
            return FurtherCalls::Settled;
        }
        if !self.waits {
            return FurtherCalls::Busy;
        }
        // Groups that wait for each other settle together.
        let settled = arrived.elapsed() > group.stall_check_after
            && process_groups.all_blocked(group.stall_check_after, self.is_idle(group))
            && process_groups.lack_calls_elsewhere(group);
        if settled { FurtherCalls::Settled } else { self.unsettled() }
    }

    /// The status of this rank for messages of other ranks.
    pub fn describe(&self, group: &GroupState, closed: bool) -> String {
        let name = group.config.key.name();
        let calls = match group.matched() {
            0 => format!("has made no call on {name}"),
            1 => format!("has made 1 call on {name}"),
            count => format!("has made {count} calls on {name}"),
        };
        match &self.pending {
            _ if closed => format!("{calls}, and {}", name.departure()),
            Some(pending) => format!("{calls}, and waits in {pending}"),
            None => calls,
        }
    }
}
