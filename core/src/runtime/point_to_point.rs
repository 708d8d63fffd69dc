//! Send and receive: the end of this process's mailboxes, made by the first use.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use super::state::{check_fork, started};
use crate::collective::device::DeviceMessages;
use crate::device::Device;
use crate::error::Result;
use crate::group::{Group, MessageOptions, Messenger};
use crate::group_key::Members;
use crate::lock::lock;
use crate::log::log_line;
use crate::p2p::{Endpoint, Hosts, Peers, Spans, Status, Then, Transfer};
use crate::transport::Calls;
use crate::transport::gpu::Context;
use crate::transport::job::Job;
use crate::transport::mailbox::memory::ArenaMemory;
use crate::transport::spin::MaxSpins;

/// What the messages on each GPU use, by ordinal.
static DEVICES: Mutex<BTreeMap<i32, Arc<DeviceMessages>>> = Mutex::new(BTreeMap::new());

/// The end of this process's mailboxes.
static ENDPOINT: Mutex<Option<Arc<Endpoint>>> = Mutex::new(None);

fn endpoint() -> Result<Arc<Endpoint>> {
    let mut place = lock(&ENDPOINT);
    if let Some(endpoint) = &*place {
        return Ok(Arc::clone(endpoint));
    }
    let endpoint = started(|runtime| {
        let calls: Arc<dyn Calls> = Arc::clone(&runtime.process_groups) as Arc<dyn Calls>;
        make_endpoint(&runtime.job, Some(calls))
    })?;
    Ok(Arc::clone(place.insert(Arc::new(endpoint))))
}

fn make_endpoint(job: &Arc<Job>, calls: Option<Arc<dyn Calls>>) -> Result<Endpoint> {
    let (ranks, topology) = (job.ranks(), &job.ranks().topology);
    let local_ranks = topology.local_ranks();
    let memory = ArenaMemory::new(Arc::clone(job.arenas()), topology.local_rank(), local_ranks.len());
    let names = Arc::clone(&ranks.names);
    let peers = Peers { world: local_ranks.to_vec(), names, liveness: Box::new(ranks.local_processes()), calls };
    let everyone = Members::World { size: topology.size(), me: topology.rank() };
    let hosts = job.take_messages().map(|network| {
        let job = Arc::clone(job);
        Hosts { network, lost: Box::new(move |rank| job.is_lost_elsewhere(rank).then(|| "is lost".to_owned())) }
    });
    Endpoint::new(Arc::new(memory), peers, MaxSpins::new(job.cpus_per_rank(topology, &everyone)), hosts)
        .inspect(Endpoint::show_process)
}

#[inline(always)]
fn messenger(group: &Group) -> Result<&Messenger> {
    check_fork()?;
    group.messenger(endpoint)
}

/// Makes the way of `group` to send and receive, which its first message needs.
///
/// # Errors
/// If the process may not send.
pub(super) fn prepare_messages(group: &Group) -> Result<()> {
    messenger(group).map(drop)
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
    let unused = || (answers && job.has_messages()).then(|| make_endpoint(job, None).map(Arc::new).ok()).flatten();
    let endpoint = lock(&ENDPOINT).take().or_else(unused);
    if let Some(Err(error)) = endpoint.as_ref().map(|endpoint| endpoint.close()) {
        log_line(&error.to_string());
    }
    drop(std::mem::take(&mut *lock(&DEVICES)));
    Closed(endpoint)
}

/// Puts the memory of a message that starts now on `device`.
///
/// # Errors
/// Those of the device; if the process may not send.
#[cold]
pub fn place_on(spans: &mut Spans, device: Device) -> Result<()> {
    check_fork()?;
    let path = started(|runtime| Ok(runtime.config.device.path))?;
    let mut devices = lock(&DEVICES);
    let messages = match devices.get(&device.ordinal) {
        Some(messages) => Arc::clone(messages),
        None => {
            let made = Arc::new(DeviceMessages::new(&Context::for_device(device.ordinal)?, path)?);
            Arc::clone(devices.entry(device.ordinal).or_insert(made))
        }
    };
    drop(devices);
    spans.set_device(Box::new(messages.memory(device)?));
    Ok(())
}

/// Starts to send `from`, as [`Endpoint::send`].
///
/// # Errors
/// As for [`Endpoint::send`]; if the process may not send.
///
/// # Safety
/// As for [`Endpoint::send`].
pub unsafe fn send(group: &Group, from: Spans, options: &MessageOptions<'_>, then: Option<Then>) -> Result<Transfer> {
    let messenger = messenger(group)?;
    // SAFETY: guaranteed by the caller.
    unsafe { Transfer::send(messenger.endpoint(), &group.message(messenger, options), from, then) }
}

/// Starts to receive into `into`, as [`Endpoint::receive`].
///
/// # Errors
/// As for [`Endpoint::receive`]; if the process may not receive.
///
/// # Safety
/// As for [`Endpoint::receive`].
pub unsafe fn receive(
    group: &Group,
    into: Spans,
    options: &MessageOptions<'_>,
    then: Option<Then>,
) -> Result<Transfer> {
    let messenger = messenger(group)?;
    // SAFETY: guaranteed by the caller.
    unsafe { Transfer::receive(messenger.endpoint(), &group.message(messenger, options), into, then) }
}

/// Sends `from`, as [`Endpoint::send_now`].
///
/// # Errors
/// As for [`Endpoint::send_now`]; if the process may not send.
///
/// # Safety
/// As for [`Endpoint::send_now`].
#[inline(always)]
pub unsafe fn send_now(group: &Group, from: Spans, options: &MessageOptions<'_>) -> Result<()> {
    group.note_waiting_for_messages();
    let messenger = messenger(group)?;
    // SAFETY: guaranteed by the caller.
    unsafe { messenger.endpoint().send_now(&group.message(messenger, options), from) }
}

/// Receives into `into`, as [`Endpoint::receive_now`].
///
/// # Errors
/// As for [`Endpoint::receive_now`]; if the process may not receive.
///
/// # Safety
/// As for [`Endpoint::receive_now`].
#[inline(always)]
pub unsafe fn receive_now(group: &Group, into: Spans, options: &MessageOptions<'_>) -> Result<Status> {
    group.note_waiting_for_messages();
    let messenger = messenger(group)?;
    // SAFETY: guaranteed by the caller.
    unsafe { messenger.endpoint().receive_now(&group.message(messenger, options), into) }
}

/// Sends and receives, as [`Endpoint::exchange`].
///
/// # Errors
/// As for [`Endpoint::exchange`]; if the process may not send and receive.
///
/// # Safety
/// As for [`Endpoint::exchange`].
pub unsafe fn exchange(
    group: &Group,
    (from, send): (Spans, &MessageOptions<'_>),
    (into, receive): (Spans, &MessageOptions<'_>),
) -> Result<Status> {
    group.note_waiting_for_messages();
    let messenger = messenger(group)?;
    let (send, receive) = (group.message(messenger, send), group.message(messenger, receive));
    // SAFETY: guaranteed by the caller.
    unsafe { messenger.endpoint().exchange((&send, from), (&receive, into)) }
}

/// The result of a send or receive, if it has ended, as [`Transfer::test`].
///
/// # Errors
/// In a forked child.
pub fn test(transfer: &Transfer) -> Result<Option<Result<Status>>> {
    check_fork()?;
    Ok(transfer.test())
}

/// Waits for a send or receive, as [`Transfer::wait`].
///
/// # Errors
/// As for [`Transfer::wait`]; in a forked child.
pub fn wait(transfer: &Transfer, timeout: Option<Duration>) -> Result<Status> {
    check_fork()?;
    transfer.wait(timeout)
}
