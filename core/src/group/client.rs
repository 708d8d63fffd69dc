//! What a client of a group uses beside its calls: the memory that its ranks share, and the limits of a wait.
//!
//! Thread rule: any thread.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use super::call_summary::CallSummary;
use super::messenger::Messenger;
use super::recorder::Submission;
use super::state::LOOK_EVERY;
use super::submit::Group;
use super::work::{CallOptions, Timeout, wait_for_result};
use crate::clock::coarse_now;
use crate::collective::Op;
use crate::error::{Error, Result, guard};
use crate::signals;
use crate::topology::Topology;
use crate::transport::WaitContext;
use crate::transport::peer_memory::PeerMemory;
use crate::transport::wait_context::with_limits;

impl Group {
    /// The members, by host.
    pub fn topology(&self) -> &Topology {
        &self.topology
    }

    /// The rank in the job of a member.
    pub fn to_world(&self, rank: usize) -> usize {
        self.shared.members.to_world(rank)
    }

    /// The deadline of its calls; `None` for none.
    pub fn timeout(&self) -> Option<Duration> {
        self.shared.deadline.of(Timeout::GroupDefault).after
    }

    /// The name of a member in messages.
    pub fn rank_name(&self, rank: usize) -> String {
        self.shared.names.get(rank).cloned().unwrap_or_else(|| format!("rank {rank}"))
    }

    /// The memory that the members of this host share.
    pub fn peer_memory(&self) -> Option<Arc<dyn PeerMemory>> {
        self.shared.region.shared_peer_memory()
    }

    /// Checks that all members of this host are there and that the group has not failed. Quick: a rank that was killed is
    /// noticed after [`LOOK_EVERY`], or when the failure detector has reported it.
    ///
    /// # Errors
    /// The failure; [`Error::PeerLost`] if a member has freed the group or is lost.
    #[inline]
    pub fn check_members(&self) -> Result<()> {
        let control = self.shared.region.control();
        if self.shared.has_failed() || control.first_departed().is_some() {
            return Err(self.broken());
        }
        let (now, looked) = (coarse_now(), &self.shared.looked_for_lost);
        let millis = u64::try_from(now.as_millis()).unwrap_or(0);
        if millis.saturating_sub(looked.load(Ordering::Relaxed)) < LOOK_EVERY.as_millis() as u64 {
            return Ok(());
        }
        looked.store(millis, Ordering::Relaxed);
        self.look_for_lost()
    }

    #[cold]
    fn look_for_lost(&self) -> Result<()> {
        self.shared.lost_rank().map_or(Ok(()), |error| {
            self.shared.fail(&error);
            Err(error)
        })
    }

    #[cold]
    fn broken(&self) -> Error {
        let departed = || {
            let rank = self.shared.region.control().first_departed()?;
            let departure = self.shared.config.key.name().departure();
            Some(Error::PeerLost(format!("{} {departure}", self.rank_name(rank))))
        };
        self.shared.failure().or_else(departed).unwrap_or_else(|| self.shared.ended())
    }

    /// The submission of a one-sided operation, now.
    pub fn submission(&self) -> Submission {
        self.shared.recorder.submission()
    }

    /// Runs an operation that this rank makes without the others, as a call of the group: with its limits, in its
    /// dumps, timeline and totals. `submission`: if it was earlier. `key` stands for what `summary` returns: its name and its bytes.
    ///
    /// # Errors
    /// Those of `work`.
    pub fn run_one_sided(
        &self,
        key: u64,
        summary: impl FnOnce() -> (String, usize),
        submission: Option<Submission>,
        timeout: Timeout,
        work: impl FnOnce(&WaitContext<'_>) -> Result<()>,
    ) -> Result<()> {
        let summary = || {
            let (name, bytes) = summary();
            CallSummary::one_sided(name, bytes)
        };
        let team = self.shared.config.key.number();
        let record = self.shared.recorder.open_one_sided(team, key, summary, submission);
        record.start(submission.is_none());
        let result = guard(|| self.with_limits(&record.summary.name_line, timeout, work));
        record.end(&result);
        result
    }

    /// Runs `work`, which `what` names in messages, with the limits of a call: its deadline, the stall warning, and the
    /// end of the group.
    ///
    /// # Errors
    /// Those of `work`.
    pub fn with_limits<T>(
        &self,
        what: &str,
        timeout: Timeout,
        work: impl FnOnce(&WaitContext<'_>) -> Result<T>,
    ) -> Result<T> {
        let interrupted =
            || signals::interrupted().then(|| Error::PeerLost(format!("{what} was interrupted by a signal")));
        let ended = || self.check_members().err().or_else(|| self.shared.lost_rank()).or_else(interrupted);
        with_limits(what, self.shared.deadline.of(timeout), self.shared.settings.stall_warn, &ended, work)
    }

    /// Waits for all members.
    ///
    /// # Errors
    /// Those of a call.
    pub fn barrier(&self, name: &str, timeout: Timeout, interrupt: impl Fn()) -> Result<()> {
        let options = CallOptions { name: name.to_owned(), caller_blocks: true, timeout, ..CallOptions::default() };
        // SAFETY: a barrier has no tensors.
        wait_for_result(interrupt, |done| unsafe { self.submit(Op::BARRIER, Vec::new(), options, done) })
    }

    /// The group's way to send and receive, if it was made.
    pub fn ready_messenger(&self) -> Result<&Messenger> {
        self.messenger.get().ok_or_else(|| Error::Internal("the messages of a group are not ready".into()))
    }
}
