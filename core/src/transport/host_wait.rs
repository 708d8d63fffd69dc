//! Waits for messages of other hosts: polls links, naps, and records for which host the time went.
//!
//! Thread rule: one thread.

use std::time::{Duration, Instant};

use super::backoff::Backoff;
use super::host_link::HostLink;
use super::wait_context::WaitContext;
use crate::error::Result;
use crate::timings::{Activity, WaitTarget};

/// A wait for messages.
#[derive(Default)]
pub struct HostWait {
    backoff: Backoff,
    /// When this thread last had something to do, if it naps.
    idle_since: Option<Instant>,
    /// The rank of this host that it then waited for.
    awaited_rank: Option<usize>,
}

impl HostWait {
    /// Polls `link`. If messages have completed, the time since the thread had something to do was a wait for their
    /// hosts, which counts for the call of `wait_ctx`.
    ///
    /// # Errors
    /// Those of the link.
    pub fn poll(&mut self, link: &mut dyn HostLink, wait_ctx: &WaitContext<'_>) -> Result<()> {
        let HostWait { idle_since, backoff, .. } = self;
        let log = wait_ctx.log();
        let completed = &mut |host: usize| {
            backoff.reset();
            if let Some(since) = idle_since {
                let now = Instant::now();
                log.add(Activity::Network, *since, now);
                log.add_wait(WaitTarget::Host(host), *since, now);
                *since = now;
            }
        };
        link.poll(completed)
    }

    /// The thread has had something to do.
    pub fn progress(&mut self, wait_ctx: &WaitContext<'_>) {
        if let Some((since, rank)) = self.idle_since.take().zip(self.awaited_rank.take()) {
            wait_ctx.log().waited(rank, since, Instant::now());
        }
        self.backoff.reset();
    }

    /// Pauses between two polls. Calls `check` regularly. `awaited_rank`: the rank of this host that the thread waits for,
    /// if it is not for other hosts.
    ///
    /// # Errors
    /// Those of `check`.
    pub fn nap(
        &mut self,
        awaited_rank: impl FnOnce() -> Option<usize>,
        check: impl FnOnce() -> Result<()>,
    ) -> Result<()> {
        if self.idle_since.is_none() {
            self.idle_since = Some(Instant::now());
            self.awaited_rank = awaited_rank();
        }
        self.backoff.nap(check)
    }
}

/// Checks the limits of a wait for the hosts whose messages are in flight on `links`.
///
/// # Errors
/// Those of the wait context.
pub fn check_hosts<'l>(links: impl IntoIterator<Item = &'l dyn HostLink>, wait_ctx: &WaitContext<'_>) -> Result<()> {
    let mut hosts: Vec<(usize, String)> = Vec::new();
    for link in links {
        hosts.extend(link.awaited().into_iter().map(|host| (host, link.host_name(host))));
    }
    hosts.sort_unstable();
    hosts.dedup();
    wait_ctx.log().set_waiting(hosts.iter().map(|(host, _)| WaitTarget::Host(*host)).collect());
    let names = || hosts.iter().map(|(_, name)| name.as_str()).collect::<Vec<_>>().join(", ");
    wait_ctx.check(Duration::ZERO, &names)
}

/// Waits until the messages of `exchange` have completed.
///
/// # Errors
/// An abort or deadline of the wait context, or a failure of the transport; the link is unusable afterwards.
pub fn finish_exchange(link: &mut dyn HostLink, exchange: usize, wait_ctx: &WaitContext<'_>) -> Result<()> {
    let mut wait = HostWait::default();
    loop {
        wait.poll(link, wait_ctx)?;
        if link.in_flight(exchange) == 0 {
            return Ok(());
        }
        wait.nap(|| None, || check_hosts([&*link], wait_ctx))?;
    }
}
