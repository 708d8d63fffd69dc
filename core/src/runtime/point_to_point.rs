//! Send and receive: the end of this process's mailboxes, made by the first use.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use super::state::{check_fork, started};
use crate::buffer::View;
use crate::error::Result;
use crate::group::{Group, MessageOptions, Messenger};
use crate::group_key::Members;
use crate::lock::lock;
use crate::log::log_line;
use crate::p2p::{Endpoint, Hosts, Peers, Request, Status, Then};
use crate::transport::job::Job;
use crate::transport::mailbox::memory::ArenaMemory;
use crate::transport::spin::MaxSpins;

/// The end of this process's mailboxes.
static ENDPOINT: Mutex<Option<Arc<Endpoint>>> = Mutex::new(None);

/// A started send or receive, with what makes its progress.
#[derive(Clone)]
pub struct Transfer {
    endpoint: Arc<Endpoint>,
    request: Arc<Request>,
}

impl Transfer {
    /// The result, if it has ended. Does not block.
    ///
    /// # Errors
    /// In a forked child.
    pub fn test(&self) -> Result<Option<Result<Status>>> {
        check_fork()?;
        Ok(self.endpoint.test(&self.request))
    }

    /// Waits for the result, as [`Endpoint::wait`].
    ///
    /// # Errors
    /// Those of the send or receive, and of the wait.
    pub fn wait(&self, timeout: Option<Duration>) -> Result<Status> {
        check_fork()?;
        self.endpoint.wait(&self.request, timeout)
    }
}

fn endpoint() -> Result<Arc<Endpoint>> {
    let mut place = lock(&ENDPOINT);
    if let Some(endpoint) = &*place {
        return Ok(Arc::clone(endpoint));
    }
    let endpoint = started(|runtime| make_endpoint(&runtime.job))?;
    Ok(Arc::clone(place.insert(Arc::new(endpoint))))
}

fn make_endpoint(job: &Arc<Job>) -> Result<Endpoint> {
    let (ranks, topology) = (job.ranks(), &job.ranks().topology);
    let local_ranks = topology.local_ranks();
    let memory = ArenaMemory::new(Arc::clone(job.arenas()), topology.local_rank(), local_ranks.len());
    let names = Arc::clone(&ranks.names);
    let peers = Peers { world: local_ranks.to_vec(), names, liveness: Box::new(ranks.local_processes()) };
    let everyone = Members::World { size: topology.size(), me: topology.rank() };
    let hosts = job.take_messages().map(|network| {
        let job = Arc::clone(job);
        Hosts { network, lost: Box::new(move |rank| job.is_lost_elsewhere(rank).then(|| "is lost".to_owned())) }
    });
    Endpoint::new(Arc::new(memory), peers, MaxSpins::new(job.cpus_per_rank(topology, &everyone)), hosts)
        .inspect(Endpoint::show_process)
}

fn messenger(group: &Group) -> Result<&Messenger> {
    check_fork()?;
    group.messenger(endpoint)
}

/// The end of the mailboxes after [`close`].
pub(super) struct Closed(Option<Arc<Endpoint>>);

impl Closed {
    /// Answers the messages that other ranks still send.
    pub fn linger(&self) {
        if let Some(endpoint) = &self.0 {
            endpoint.linger();
        }
    }

    /// Ends the use of the network; `together` as in [`Endpoint::leave_network`].
    pub fn end(self, together: bool) {
        if let Some(endpoint) = self.0 {
            endpoint.leave_network(together);
        }
    }
}

/// Ends the sends and receives of this process. Those of other ranks from it fail, once they have what was sent. With
/// `answers`, a rank that has sent and received nothing tells that to ranks of other hosts that wait for it, too.
pub(super) fn close(job: &Arc<Job>, answers: bool) -> Closed {
    let unused = || (answers && job.has_messages()).then(|| make_endpoint(job).map(Arc::new).ok()).flatten();
    let endpoint = lock(&ENDPOINT).take().or_else(unused);
    if let Some(Err(error)) = endpoint.as_ref().map(|endpoint| endpoint.close()) {
        log_line(&error.to_string());
    }
    Closed(endpoint)
}

/// Starts a send, as [`Group::send`].
///
/// # Errors
/// As for [`Group::send`]; if the process may not send.
///
/// # Safety
/// As for [`Group::send`].
pub unsafe fn send(
    group: &Group,
    views: &[View<'_>],
    options: MessageOptions<'_>,
    then: Option<Then>,
) -> Result<Transfer> {
    let messenger = messenger(group)?;
    // SAFETY: guaranteed by the caller.
    let request = unsafe { group.send(messenger, views, options, then) }?;
    Ok(Transfer { endpoint: Arc::clone(messenger.endpoint()), request })
}

/// Starts a receive, as [`Group::receive`].
///
/// # Errors
/// As for [`Group::receive`]; if the process may not receive.
///
/// # Safety
/// As for [`Group::receive`].
pub unsafe fn receive(
    group: &Group,
    views: &[View<'_>],
    options: MessageOptions<'_>,
    then: Option<Then>,
) -> Result<Transfer> {
    let messenger = messenger(group)?;
    // SAFETY: guaranteed by the caller.
    let request = unsafe { group.receive(messenger, views, options, then) }?;
    Ok(Transfer { endpoint: Arc::clone(messenger.endpoint()), request })
}

/// Sends and receives, as [`Group::send_receive`].
///
/// # Errors
/// As for [`Group::send_receive`]; if the process may not send and receive.
///
/// # Safety
/// As for [`Group::send_receive`].
pub unsafe fn send_receive(
    group: &Group,
    send: Option<(&[View<'_>], MessageOptions<'_>)>,
    receive: Option<(&[View<'_>], MessageOptions<'_>)>,
) -> Result<Option<Status>> {
    // SAFETY: guaranteed by the caller.
    unsafe { group.send_receive(messenger(group)?, send, receive) }
}
