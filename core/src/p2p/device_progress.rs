//! The part of an endpoint's state that concerns messages in the memory of a device.
//!
//! A send starts once the earlier work on its memory is done, and those after it to the same rank with it. A short message, and
//! one to another host or to this rank, is copied to host memory first. A long one is announced with what the receiver needs
//! to open its memory; it is copied to host memory if the receiver cannot, or is not on a device. A receive ends once its data
//! is in the memory of its device.
//! Thread rule: used under the lock of the endpoint.

use smallvec::SmallVec;

use super::message::Status;
use super::pending::{Finished, Held, Receive, Send};
use super::progress::State;
use crate::error::{Error, Result};
use crate::transport::mailbox::ring::CELL_BYTES;

impl State {
    /// Whether something is under way that only looking at it can end: it wakes nobody.
    #[inline]
    pub fn must_be_polled(&self) -> bool {
        self.awaits_network() || self.awaits_device()
    }

    #[inline]
    pub(super) fn awaits_device(&self) -> bool {
        !self.held.is_empty() || !self.copying.is_empty() || !self.finished.deliveries.is_empty()
    }

    /// Starts a send to rank `world` of the job, which is `local` on this host or on another one.
    pub fn start_send(&mut self, world: usize, local: Option<usize>, send: Send) {
        if send.from.is_on_device() || self.held.iter().any(|held| held.world == world) {
            self.held.push(Held { world, local, send });
            self.look_at_devices();
        } else {
            self.pass_on(world, local, send);
        }
    }

    fn pass_on(&mut self, world: usize, local: Option<usize>, send: Send) {
        match local {
            Some(to) => self.send(to, send),
            None => self.send_far(world, send),
        }
    }

    /// Does what devices are ready for; returns whether that was anything.
    pub(super) fn look_at_devices(&mut self) -> bool {
        let (mut moved, mut waiting, mut index) = (false, SmallVec::<[usize; 4]>::new(), 0);
        while let Some(held) = self.held.get_mut(index) {
            let is_ready = if waiting.contains(&held.world) { Ok(false) } else { prepare(held, self.me) };
            if is_ready == Ok(false) {
                waiting.push(held.world);
                index += 1;
                continue;
            }
            let Held { world, local, send } = self.held.remove(index);
            match is_ready {
                Ok(_) => self.pass_on(world, local, send),
                Err(error) => self.finished.push((send.request, Err(error))),
            }
            moved = true;
        }
        index = 0;
        while let Some((receive, status)) = self.finished.deliveries.get_mut(index) {
            let delivered = receive.into.delivered(status.bytes);
            if delivered == Ok(false) {
                index += 1;
                continue;
            }
            let (receive, status) = self.finished.deliveries.remove(index);
            self.finished.push((receive.request, delivered.map(|_| status)));
            moved = true;
        }
        moved
    }
}

/// Whether a send of local rank `me` can be passed on.
fn prepare(held: &mut Held, me: usize) -> Result<bool> {
    let from = &mut held.send.from;
    if !from.is_ready()? {
        return Ok(false);
    }
    if held.local.is_none_or(|to| to == me) || from.len() <= CELL_BYTES {
        return from.in_host_memory();
    }
    from.export(held.world);
    Ok(true)
}

/// Ends the sends that wait for their device, and the receives whose data is on its way to it, for which the functions have
/// an error. The first gets the receiver's rank in the job.
pub(super) fn fail_on_devices(
    held: &mut Vec<Held>,
    finished: &mut Finished,
    send_fails: impl Fn(usize, &Send) -> Option<Error>,
    receive_fails: impl Fn(&Receive, Status) -> Option<Error>,
) {
    for each in std::mem::take(held) {
        match send_fails(each.world, &each.send) {
            None => held.push(each),
            Some(error) => finished.push((each.send.request, Err(error))),
        }
    }
    for (mut receive, status) in std::mem::take(&mut finished.deliveries) {
        match receive_fails(&receive, status) {
            None => finished.deliveries.push((receive, status)),
            Some(error) => {
                receive.into.settle();
                finished.push((receive.request, Err(error)));
            }
        }
    }
}
