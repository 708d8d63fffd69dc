//! Ranks of a host with mutually open GPU memory, and barriers of their streams.
//!
//! Each rank has device memory that the others read and write (its bounce buffer), and a counter in shared host memory.
//! A stream writes its rank's counter and waits for the others. So no kernel spins on another process, whose kernels
//! may not run at the same time.
//! A stream waits only for work that is already enqueued: the hosts synchronize first. So two groups cannot deadlock,
//! even when hardware queues or driver calls serialize their streams.
//! Thread rule: used by one thread; any thread may release the streams.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use super::batch::Launcher;
use super::ipc_flags::{LocalIpc, PAGES, Page, StreamFlags, can_wait_on, export, export_words, exported};
use super::path::common_sync;
use super::release::StreamRelease;
use super::settings::SyncMode;
use super::shm_allgather::allgather_u64;
use super::streams::{TEARDOWN_TIMEOUT, is_idle, poll_until, wait_event};
use crate::collective::channel::Channel;
use crate::collective::value_allgather::allgather_merge;
use crate::error::{Error, Result};
use crate::transport::WaitContext;
use crate::transport::gpu::{Address, Context, DeviceBuffer, PeerImports, Stream};
use crate::transport::shm_region::LocalPeer;

pub(super) struct IpcPeers {
    pub context: Arc<Context>,
    pub stream: Stream,
    /// Whether the stream or the host waits for the other ranks.
    pub sync: SyncMode,
    /// This rank's local rank.
    pub me: usize,
    flags: Arc<StreamFlags>,
    /// By local rank; empty for this rank.
    pub imports: Vec<PeerImports>,
    pub bounce: DeviceBuffer,
    /// Addresses of the bounce buffers, by local rank.
    pub bounces: Vec<Address>,
}

/// Device memory of each rank that all ranks of the host can access.
pub(super) struct Window {
    pub own: DeviceBuffer,
    /// By local rank.
    pub at: Vec<Address>,
}

impl IpcPeers {
    /// Opens the ranks' memory to each other, with bounce buffers of `bytes`, and returns `more` with it. If any rank
    /// on any host fails in that or in `more`, all ranks get the reason.
    pub fn new<M>(
        channel: &mut Channel,
        context: &Arc<Context>,
        sync: SyncMode,
        bytes: usize,
        more: Result<M>,
        wait_ctx: &WaitContext<'_>,
    ) -> Result<std::result::Result<(IpcPeers, M), String>> {
        let _guard = context.push()?;
        let own = more.and_then(|more| Ok((LocalIpc::new(channel, context, bytes)?, more)));
        let local: Vec<u64> = match &own {
            Ok((own, _)) => [own.page_offset].into_iter().chain(export_words(&own.export)).collect(),
            Err(_) => Vec::new(),
        };
        let (region, me) = (Arc::clone(channel.region()), channel.topology.local_rank());
        let opened = allgather_u64(channel, &local, wait_ctx, |words_by_rank| {
            let open = |own: LocalIpc| IpcPeers::open(context, sync, region.peers(), me, own, words_by_rank);
            Ok(own.and_then(|(own, more)| Ok((open(own)?, more))))
        })?;
        let local = opened.as_ref().map(|(peers, _)| peers.sync).map_err(|error| error.detail().to_owned());
        let all = allgather_merge(channel, &local, wait_ctx, common_sync)?;
        Ok(match (opened, all) {
            (Ok((mut peers, more)), Ok(sync)) => {
                peers.sync = sync;
                Ok((peers, more))
            }
            (Ok((peers, _)), Err(error)) => {
                // Some peers may already be gone; do not wait for them.
                peers.flags.release();
                Err(error)
            }
            (Err(error), all) => Err(all.err().unwrap_or_else(|| error.detail().to_owned())),
        })
    }

    fn open(
        context: &Arc<Context>,
        mut sync: SyncMode,
        ranks: &[LocalPeer],
        me: usize,
        own: LocalIpc,
        words_by_rank: &[&[u64]],
    ) -> Result<IpcPeers> {
        let LocalIpc { shared, bounce, page_offset: _, export: _ } = own;
        let mut pages = Vec::new();
        for (rank, words) in words_by_rank.iter().enumerate() {
            let [page_offset, ..] = words else {
                return Err(Error::System("another rank cannot export its memory".into()));
            };
            let cannot_access = || Error::Internal("the flags of a rank are not in memory that the others map".into());
            let memory = shared.resolve(rank, *page_offset, PAGES).ok_or_else(cannot_access)?;
            // SAFETY: the arena stays mapped, and its owner keeps the page until its group ends.
            pages.push(unsafe { Page::new(context, memory) });
        }
        let mut imports: Vec<PeerImports> = ranks.iter().map(|peer| PeerImports::new(context, peer.world)).collect();
        let exports: Vec<&[u64]> = words_by_rank.iter().map(|words| &words[1..]).collect();
        let bounces = addresses(&mut imports, me, bounce.address(), &exports)?;
        let stream = Stream::new(context)?;
        let flags = StreamFlags::new(context, pages, me)?;
        if sync == SyncMode::Stream && !can_wait_on_pages(&stream, &flags, me)? {
            sync = SyncMode::Host;
        }
        Ok(IpcPeers {
            context: Arc::clone(context),
            stream,
            sync,
            me,
            flags: Arc::new(flags),
            imports,
            bounce,
            bounces,
        })
    }

    /// Allocates `bytes` on each rank, accessible to all ranks; `None` on all of them if one fails.
    pub fn window(
        &mut self,
        channel: &mut Channel,
        bytes: usize,
        wait_ctx: &WaitContext<'_>,
    ) -> Result<Option<Window>> {
        let own = exported(&self.context, bytes).ok();
        let local: Vec<u64> = own.iter().flat_map(|(_, export)| export_words(export)).collect();
        let (imports, me) = (&mut self.imports, self.me);
        let opened = allgather_u64(channel, &local, wait_ctx, |words_by_rank| {
            Ok(own.and_then(|(own, _)| {
                Some(Window { at: addresses(imports, me, own.address(), words_by_rank).ok()?, own })
            }))
        })?;
        let all = all_agree(channel, opened.is_some(), wait_ctx)?;
        Ok(opened.filter(|_| all))
    }

    /// A launcher whose kernels end after a rank was lost.
    pub fn launcher(&self) -> Result<Launcher> {
        let mut launcher = Launcher::new(&self.context);
        launcher.stop = self.flags.stop_address()?;
        Ok(launcher)
    }

    /// Unblocks the streams of all ranks after one was lost.
    pub fn stream_release(&self) -> Arc<dyn StreamRelease> {
        Arc::clone(&self.flags) as Arc<dyn StreamRelease>
    }

    /// Orders all work that any rank has enqueued before all later work of this rank.
    pub fn stream_barrier(&mut self, channel: &mut Channel, wait_ctx: &WaitContext<'_>) -> Result<()> {
        let seq = self.flags.seq.load(Ordering::Relaxed).wrapping_add(1);
        self.flags.seq.store(seq, Ordering::Relaxed);
        match self.sync {
            SyncMode::Stream => {
                // SAFETY: the page is pinned while the stream lives.
                unsafe { self.stream.write_value32(self.flags.pages[self.me].address()?, seq) }?;
                // All ranks have now enqueued the writes that the others wait for.
                allgather_u64(channel, &[], wait_ctx, |_| Ok(()))?;
                for (_, page) in self.flags.pages.iter().enumerate().filter(|(rank, _)| *rank != self.me) {
                    // SAFETY: as above.
                    unsafe { self.stream.wait_value32_ge(page.address()?, seq) }?;
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

/// Whether the stream can write and wait on this rank's page. It is memory shared between processes, which a driver may
/// refuse to pin or treat differently.
fn can_wait_on_pages(stream: &Stream, flags: &StreamFlags, me: usize) -> Result<bool> {
    if flags.pages.iter().any(|page| page.address().is_err()) {
        return Ok(false);
    }
    // SAFETY: the page is pinned as long as the stream lives.
    unsafe { can_wait_on(stream, flags.pages[me].address()?, 0) }
}

/// The addresses in this process of each rank's memory: `own`, and the peers' exports.
fn addresses(imports: &mut [PeerImports], me: usize, own: Address, words_by_rank: &[&[u64]]) -> Result<Vec<Address>> {
    let address = |(rank, words): (usize, &&[u64])| {
        if rank == me {
            return Ok(own);
        }
        let export = export(words).ok_or_else(|| Error::System("another rank cannot export its memory".into()))?;
        imports[rank].apply(&[export], &[])?;
        imports[rank].at(export.id)
    };
    words_by_rank.iter().enumerate().map(address).collect()
}

/// Whether `local` is true on all ranks of the host.
pub(super) fn all_agree(channel: &mut Channel, local: bool, wait_ctx: &WaitContext<'_>) -> Result<bool> {
    allgather_u64(channel, &[u64::from(local)], wait_ctx, |words_by_rank| {
        Ok(words_by_rank.iter().all(|words| words == &[1]))
    })
}

impl Drop for IpcPeers {
    /// Frees the memory when no rank uses it: after this rank's stream has finished, and all others have come here too
    /// or are lost.
    fn drop(&mut self) {
        let Ok(_guard) = self.context.push() else { return };
        if !is_idle(&self.stream) {
            self.flags.release();
            let _or_never = is_idle(&self.stream);
        }
        let final_seq = self.flags.seq.load(Ordering::Relaxed).wrapping_add(1);
        // Keep released flags high: peers may wait for later barriers.
        if !self.flags.is_released() {
            self.flags.raise(final_seq);
        }
        poll_until(TEARDOWN_TIMEOUT, || self.flags.is_released() || self.flags.all_reached(final_seq));
    }
}
