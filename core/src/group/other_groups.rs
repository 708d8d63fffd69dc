//! What a rank does beside a team, while the ranks of that team reconcile their calls.
//!
//! Thread rule: used by the thread that leads the team.

use std::time::{Duration, Instant};

use rustix::time::{ClockId, clock_gettime};

use super::state::GroupState;
use crate::collective::matching::Outlook;

/// What is known of it; see the module's text.
pub(super) struct OtherGroups {
    /// How many calls of this rank were given up, in whatever team, before this reconciliation.
    given_up: u64,
    /// The call that it waits for, or waited for last.
    pending: Option<String>,
    /// Whether it waits for that call now.
    waits: bool,
    /// When the reconciliation began, by the clock and by the time that the process has spent on processors.
    since: (Instant, Duration),
}

/// The processor time of this process.
fn spent() -> Duration {
    let time = clock_gettime(ClockId::ProcessCPUTime);
    Duration::new(time.tv_sec.unsigned_abs(), u32::try_from(time.tv_nsec).unwrap_or(0))
}

impl OtherGroups {
    /// At the start of a reconciliation of `team`.
    pub fn new(team: &GroupState) -> OtherGroups {
        let since = (Instant::now(), spent());
        let mut other_groups =
            OtherGroups { given_up: team.process_groups.given_up(), pending: None, waits: false, since };
        other_groups.poll(team);
        other_groups
    }

    /// Looks again.
    pub fn poll(&mut self, team: &GroupState) {
        let pending = team.process_groups.pending_elsewhere(team, team.stall_check_after);
        self.waits = pending.is_some();
        self.pending = pending.or(self.pending.take());
    }

    /// What a rank expects that waits for some call, but may have threads that do not: that is known from the processor time
    /// only. Waits and reconciliation take far less than a tenth of one processor.
    pub fn unsettled(&self) -> Outlook {
        let (started, before) = self.since;
        let computes = spent().saturating_sub(before) > started.elapsed() / 10;
        if computes { Outlook::Busy } else { Outlook::Open }
    }

    /// What further calls this rank expects in `team`, to which the last one came at `arrived`.
    pub fn outlook(&self, team: &GroupState, arrived: Instant) -> Outlook {
        let process_groups = &team.process_groups;
        if self.pending.is_some() && process_groups.given_up() > self.given_up {
            // The call elsewhere was given up because this team's ranks and that one's wait for each other: so was this rank's
            // part here.
            return Outlook::Settled;
        }
        if !self.waits {
            return Outlook::Busy;
        }
        // The teams that wait for each other find out together.
        let settled = arrived.elapsed() > team.stall_check_after
            && process_groups.all_blocked(team.stall_check_after)
            && process_groups.reconcile_elsewhere(team);
        if settled { Outlook::Settled } else { self.unsettled() }
    }

    /// Words for the other ranks.
    pub fn describe(&self, team: &GroupState, closed: bool) -> String {
        let name = match team.settings.id {
            -1 => "the control team".to_owned(),
            id => format!("team {id}"),
        };
        let calls = match team.matched() {
            0 => format!("has made no call on {name}"),
            1 => format!("has made 1 call on {name}"),
            count => format!("has made {count} calls on {name}"),
        };
        match &self.pending {
            _ if closed => format!("{calls}, and has called finalize"),
            Some(pending) => format!("{calls}, and waits in {pending}"),
            None => calls,
        }
    }
}
