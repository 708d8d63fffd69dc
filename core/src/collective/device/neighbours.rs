//! The ranks of a host whose GPU memory is open to each other, and how their streams meet.
//!
//! Each has memory that the others read and write (its bounce), and a number in host memory that all ranks share: a stream
//! writes its own and waits for those of the others, so that no kernel spins on another process, whose kernels may not run at
//! the same time. A stream is made to wait only when what it waits for has been enqueued on every rank: the hosts meet before.
//! So no two teams can wait for each other, whatever the hardware's queues, or functions of the driver that wait for all of
//! them, mix up.
//! Thread rule: used by one thread; the closure of [`Neighbours::rescue`] may run on any.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use super::super::{Channel, rounds};
use super::notes::tell;
use super::path::Wait;
use super::peers::{Flags, Own, PAGE, handle, words};
use super::{LAST, await_event, has_ended, within};
use crate::error::{Error, Result};
use crate::transport::Patience;
use crate::transport::cuda::{Address, Context, DeviceMemory, Export, Exports, Imports, Pinned, Stream};

pub(super) struct Neighbours {
    pub context: Arc<Context>,
    pub stream: Stream,
    wait: Wait,
    /// The own local rank.
    pub me: usize,
    flags: Arc<Flags>,
    pub exports: Exports,
    /// By local rank; nothing is in the own.
    pub imports: Vec<Imports>,
    bounce: DeviceMemory,
    /// Where the ranks' bounces are, by local rank.
    pub bounces: Vec<Address>,
}

impl Neighbours {
    /// Opens the ranks' memory to each other, each with a bounce of `bytes`, and gives `more` back with it. Where one of them, on
    /// whatever host, has failed in that or in `more`, all get to know why.
    ///
    /// # Errors
    /// Those of the transports.
    pub fn new<M>(
        channel: &mut Channel,
        context: &Arc<Context>,
        wait: Wait,
        bytes: usize,
        more: Result<M>,
        patience: &Patience<'_>,
    ) -> Result<std::result::Result<(Neighbours, M), String>> {
        let _entered = context.enter()?;
        let own = more.and_then(|more| Ok((Own::new(channel, context, bytes)?, more)));
        let mine: Vec<u64> = match &own {
            Ok((own, _)) => [own.place].into_iter().chain(words(&own.export.handle)).collect(),
            Err(_) => Vec::new(),
        };
        let me = channel.topology.local_rank();
        let made = tell(channel, &mine, patience, |told| {
            Ok(own.and_then(|(own, more)| Ok((Neighbours::open(context, wait, me, own, told)?, more))))
        })?;
        let why = made.as_ref().err().map_or(String::new(), |error| error.detail().to_owned());
        let why = rounds::round(channel, &why, patience, |told| {
            let failed = told.iter().find(|(_, why)| !why.is_empty());
            failed.map_or(String::new(), |(rank, why)| format!("rank {rank}: {why}"))
        })?;
        Ok(match made {
            Ok(opened) if why.is_empty() => Ok(opened),
            Ok((near, _)) => {
                // Some of the others may not be there to wait for.
                near.flags.release();
                Err(why)
            }
            Err(_) => Err(why),
        })
    }

    fn open(context: &Arc<Context>, wait: Wait, me: usize, own: Own, told: &[&[u64]]) -> Result<Neighbours> {
        let Own { shared, bounce, exports, place: _, export: _ } = own;
        let mut flags = Flags::default();
        let mut imports = Vec::new();
        let mut bounces = Vec::new();
        for (rank, words) in told.iter().enumerate() {
            let [place, numbers @ ..] = words else {
                return Err(Error::System("another rank cannot show its memory".into()));
            };
            let mut seen = Imports::new(context);
            if rank == me {
                bounces.push(bounce.address());
            } else {
                let handle = handle(numbers).ok_or_else(|| Error::Internal("a handle is cut off".into()))?;
                seen.hear(&[Export { number: 0, handle }], &[])?;
                bounces.push(seen.at(0)?);
            }
            imports.push(seen);
            let unseen = || Error::Internal("a rank's page of flags is not where the others see it".into());
            let memory = shared.at(rank, *place, PAGE).ok_or_else(unseen)?;
            // SAFETY: the arena stays mapped, and its owner keeps the page until its team ends.
            flags.pages.push(unsafe { Pinned::new(context, memory, PAGE) }?);
        }
        let stream = Stream::new(context)?;
        if wait == Wait::Stream {
            // Here the numbers are in memory that other processes share, which a driver may treat in another way.
            let page = &flags.pages[me];
            // SAFETY: the page is pinned as long as the stream lives.
            unsafe { stream.write_number(page.address(), 0).and_then(|()| stream.wait_for_number(page.address(), 0)) }?;
            let event = stream.record()?;
            if !within(LAST, || event.has_come().unwrap_or(false)) {
                return Err(Error::System("its stream does not see numbers in shared memory".into()));
            }
        }
        let context = Arc::clone(context);
        Ok(Neighbours { context, stream, wait, me, flags: Arc::new(flags), exports, imports, bounce, bounces })
    }

    /// The bytes of device memory that this rank has taken.
    pub fn held(&self) -> usize {
        self.bounce.bytes()
    }

    /// Lets the streams of all ranks go on after one was lost.
    pub fn rescue(&self) -> Arc<dyn Fn() + Send + Sync> {
        let flags = Arc::clone(&self.flags);
        Arc::new(move || flags.release())
    }

    /// What all ranks have enqueued before is done before anything that this one enqueues from here on.
    ///
    /// # Errors
    /// Those of the driver and of the transports, and when the patience ends.
    pub fn meet(&mut self, channel: &mut Channel, patience: &Patience<'_>) -> Result<()> {
        let step = self.flags.step.load(Ordering::Relaxed).wrapping_add(1);
        self.flags.step.store(step, Ordering::Relaxed);
        match self.wait {
            Wait::Stream => {
                // SAFETY: the page is pinned as long as the stream lives.
                unsafe { self.stream.write_number(self.flags.pages[self.me].address(), step) }?;
                // Now all have enqueued what the others wait for.
                tell(channel, &[], patience, |_| Ok(()))?;
                for (_, page) in self.flags.pages.iter().enumerate().filter(|(rank, _)| *rank != self.me) {
                    // SAFETY: as above.
                    unsafe { self.stream.wait_for_number(page.address(), step) }?;
                }
                Ok(())
            }
            Wait::Host => {
                let event = self.stream.record()?;
                await_event(&event, patience)?;
                tell(channel, &[], patience, |_| Ok(()))
            }
        }
    }
}

impl Drop for Neighbours {
    /// Memory that others have open goes when nobody is at work on it: when this rank's stream has done with theirs, and all
    /// others have come here too, or are gone.
    fn drop(&mut self) {
        let Ok(_entered) = self.context.enter() else { return };
        if !has_ended(&self.stream) {
            self.flags.release();
            let _or_never = has_ended(&self.stream);
        }
        let last = self.flags.step.load(Ordering::Relaxed).wrapping_add(1);
        // What was released stays far ahead: others may wait for more than the last meeting to which this rank came.
        if !self.flags.is_released() {
            self.flags.raise(self.me, last);
        }
        within(LAST, || self.flags.is_released() || self.flags.all_have(last));
    }
}
