//! The ranks of a host whose GPU memory is open to each other, and how their streams meet.
//!
//! Each has memory that the others read and write (its bounce), and a number in host memory that all ranks share: a stream
//! writes its own and waits for those of the others, so that no kernel spins on another process, whose kernels may not run at
//! the same time. A stream is made to wait only when what it waits for has been enqueued on every rank: the hosts meet before.
//! So no two teams can wait for each other, whatever the hardware's queues, or functions of the driver that wait for all of
//! them, mix up.
//! Thread rule: used by one thread; the closure of [`IpcPeers::rescue`] may run on any.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use super::ipc_flags::{LocalIpc, PAGE, Page, StreamFlags, export, export_words, exported};
use super::poll::{TEARDOWN_TIMEOUT, is_idle, poll_until, wait_event};
use super::settings::SyncMode;
use super::shm_allgather::allgather_u64;
use crate::collective::channel::Channel;
use crate::collective::text_allgather::allgather_merge;
use crate::error::{Error, Result};
use crate::topology::Topology;
use crate::transport::WaitContext;
use crate::transport::gpu::{Address, Context, DeviceBuffer, PeerImports, Stream};

pub(super) struct IpcPeers {
    pub context: Arc<Context>,
    pub stream: Stream,
    wait: SyncMode,
    /// The own local rank.
    pub me: usize,
    flags: Arc<StreamFlags>,
    /// By local rank; nothing is in the own.
    pub imports: Vec<PeerImports>,
    bounce: DeviceBuffer,
    /// Where the ranks' bounces are, by local rank.
    pub bounces: Vec<Address>,
}

/// Memory of each rank that all ranks of the host see.
pub(super) struct Window {
    own: DeviceBuffer,
    /// By local rank.
    pub at: Vec<Address>,
}

impl Window {
    /// The bytes of device memory that this rank has taken.
    pub fn held(&self) -> usize {
        self.own.bytes()
    }
}

impl IpcPeers {
    /// Opens the ranks' memory to each other, each with a bounce of `bytes`, and gives `more` back with it. Where one of them, on
    /// whatever host, has failed in that or in `more`, all get to know why.
    ///
    /// # Errors
    /// Those of the transports.
    pub fn new<M>(
        channel: &mut Channel,
        context: &Arc<Context>,
        wait: SyncMode,
        bytes: usize,
        more: Result<M>,
        wait_ctx: &WaitContext<'_>,
    ) -> Result<std::result::Result<(IpcPeers, M), String>> {
        let _entered = context.push()?;
        let own = more.and_then(|more| Ok((LocalIpc::new(channel, context, bytes)?, more)));
        let mine: Vec<u64> = match &own {
            Ok((own, _)) => [own.place].into_iter().chain(export_words(&own.export)).collect(),
            Err(_) => Vec::new(),
        };
        let topology = Arc::clone(&channel.topology);
        let made = allgather_u64(channel, &mine, wait_ctx, |texts| {
            Ok(own.and_then(|(own, more)| Ok((IpcPeers::open(context, wait, &topology, own, texts)?, more))))
        })?;
        let mine = match &made {
            Ok((peers, _)) => Ok(peers.wait),
            Err(error) => Err(error.detail().to_owned()),
        };
        // The first error, or whether a host has to wait.
        let all = allgather_merge(channel, &mine, wait_ctx, |ranks| {
            let mut sync = SyncMode::Stream;
            for (rank, mine) in ranks.into_iter().enumerate() {
                match mine {
                    Ok(SyncMode::Stream) => {}
                    Ok(SyncMode::Host) => sync = SyncMode::Host,
                    Err(error) => return Err(format!("rank {rank}: {error}")),
                }
            }
            Ok(sync)
        })?;
        Ok(match (made, all) {
            (Ok((mut peers, more)), Ok(sync)) => {
                peers.wait = sync;
                Ok((peers, more))
            }
            (Ok((peers, _)), Err(error)) => {
                // Some of the others may not be there to wait for.
                peers.flags.release_all();
                Err(error)
            }
            (Err(error), all) => Err(all.err().unwrap_or_else(|| error.detail().to_owned())),
        })
    }

    fn open(
        context: &Arc<Context>,
        mut wait: SyncMode,
        topology: &Topology,
        own: LocalIpc,
        texts: &[&[u64]],
    ) -> Result<IpcPeers> {
        let me = topology.local_rank();
        let LocalIpc { shared, bounce, place: _, export: _ } = own;
        let mut pages = Vec::new();
        for (rank, words) in texts.iter().enumerate() {
            let [place, ..] = words else {
                return Err(Error::System("another rank cannot export its memory".into()));
            };
            let unseen = || Error::Internal("the flags of a rank are not in memory that the others map".into());
            let memory = shared.resolve(rank, *place, PAGE).ok_or_else(unseen)?;
            // SAFETY: the arena stays mapped, and its owner keeps the page until its team ends.
            pages.push(unsafe { Page::new(context, memory) });
        }
        let mut seen: Vec<PeerImports> =
            topology.local_ranks().iter().map(|&rank| PeerImports::new(context, rank)).collect();
        let exports: Vec<&[u64]> = texts.iter().map(|words| &words[1..]).collect();
        let bounces = addresses(&mut seen, me, bounce.address(), &exports)?;
        let stream = Stream::new(context)?;
        let flags = StreamFlags::new(context, pages)?;
        if wait == SyncMode::Stream && !sees_pages(&stream, &flags, me)? {
            wait = SyncMode::Host;
        }
        Ok(IpcPeers {
            context: Arc::clone(context),
            stream,
            wait,
            me,
            flags: Arc::new(flags),
            imports: seen,
            bounce,
            bounces,
        })
    }

    /// Takes `bytes` on each rank for all ranks to see; `None` on all of them where that fails on one.
    ///
    /// # Errors
    /// Those of the transports.
    pub fn window(
        &mut self,
        channel: &mut Channel,
        bytes: usize,
        wait_ctx: &WaitContext<'_>,
    ) -> Result<Option<Window>> {
        let own = exported(&self.context, bytes).ok();
        let mine: Vec<u64> = own.iter().flat_map(|(_, export)| export_words(export)).collect();
        let (seen, me) = (&mut self.imports, self.me);
        let made = allgather_u64(channel, &mine, wait_ctx, |texts| {
            Ok(own.and_then(|(own, _)| Some(Window { at: addresses(seen, me, own.address(), texts).ok()?, own })))
        })?;
        let all = all_agree(channel, made.is_some(), wait_ctx)?;
        Ok(made.filter(|_| all))
    }

    /// Who waits for the other ranks.
    pub fn wait(&self) -> SyncMode {
        self.wait
    }

    /// Where the GPU finds the number that ends kernels when a rank was lost.
    pub fn stop_address(&self) -> Address {
        self.flags.stop_address()
    }

    /// The bytes of device memory that this rank has taken.
    pub fn held(&self) -> usize {
        self.bounce.bytes()
    }

    /// Lets the streams of all ranks go on after one was lost.
    pub fn release_streams(&self) -> Arc<dyn Fn() + Send + Sync> {
        let flags = Arc::clone(&self.flags);
        Arc::new(move || flags.release_all())
    }

    /// What all ranks have enqueued before is done before anything that this one enqueues from here on.
    ///
    /// # Errors
    /// Those of the driver and of the transports, and when the wait context ends.
    pub fn stream_barrier(&mut self, channel: &mut Channel, wait_ctx: &WaitContext<'_>) -> Result<()> {
        let step = self.flags.seq.load(Ordering::Relaxed).wrapping_add(1);
        self.flags.seq.store(step, Ordering::Relaxed);
        match self.wait {
            SyncMode::Stream => {
                // SAFETY: the page is pinned as long as the stream lives.
                unsafe { self.stream.write_value32(self.flags.pages[self.me].address()?, step) }?;
                // Now all have enqueued what the others wait for.
                allgather_u64(channel, &[], wait_ctx, |_| Ok(()))?;
                for (_, page) in self.flags.pages.iter().enumerate().filter(|(rank, _)| *rank != self.me) {
                    // SAFETY: as above.
                    unsafe { self.stream.wait_value32_ge(page.address()?, step) }?;
                }
                Ok(())
            }
            SyncMode::Host => {
                let event = self.stream.record()?;
                wait_event(&event, wait_ctx)?;
                allgather_u64(channel, &[], wait_ctx, |_| Ok(()))
            }
        }
    }
}

/// Whether the stream writes to the own page and waits for it: it is memory that processes share, which a driver may refuse to
/// pin or treat in another way than memory of its own.
fn sees_pages(stream: &Stream, flags: &StreamFlags, me: usize) -> Result<bool> {
    if flags.pages.iter().any(|page| page.address().is_err()) {
        return Ok(false);
    }
    let address = flags.pages[me].address()?;
    // SAFETY: the page is pinned as long as the stream lives.
    unsafe { stream.write_value32(address, 0).and_then(|()| stream.wait_value32_ge(address, 0)) }?;
    let event = stream.record()?;
    Ok(poll_until(TEARDOWN_TIMEOUT, || event.is_complete().unwrap_or(false)))
}

/// Where memory of each rank is in this process: `own`, and what the others told, each an export in numbers.
fn addresses(seen: &mut [PeerImports], me: usize, own: Address, texts: &[&[u64]]) -> Result<Vec<Address>> {
    let address = |(rank, words): (usize, &&[u64])| {
        if rank == me {
            return Ok(own);
        }
        let export = export(words).ok_or_else(|| Error::System("another rank cannot export its memory".into()))?;
        seen[rank].apply(&[export], &[])?;
        seen[rank].at(export.id)
    };
    texts.iter().enumerate().map(address).collect()
}

/// Whether `mine` is true on all ranks of the host.
///
/// # Errors
/// Those of the transports.
pub(super) fn all_agree(channel: &mut Channel, mine: bool, wait_ctx: &WaitContext<'_>) -> Result<bool> {
    allgather_u64(channel, &[u64::from(mine)], wait_ctx, |texts| Ok(texts.iter().all(|words| words == &[1])))
}

impl Drop for IpcPeers {
    /// Memory that others have open goes when nobody is at work on it: when this rank's stream has done with theirs, and all
    /// others have come here too, or are gone.
    fn drop(&mut self) {
        let Ok(_entered) = self.context.push() else { return };
        if !is_idle(&self.stream) {
            self.flags.release_all();
            let _or_never = is_idle(&self.stream);
        }
        let last = self.flags.seq.load(Ordering::Relaxed).wrapping_add(1);
        // What was released stays far ahead: others may wait for more than the last meeting to which this rank came.
        if !self.flags.is_released() {
            self.flags.raise(self.me, last);
        }
        poll_until(TEARDOWN_TIMEOUT, || self.flags.is_released() || self.flags.all_reached(last));
    }
}
