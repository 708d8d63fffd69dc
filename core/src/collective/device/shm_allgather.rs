//! What the ranks of a host tell each other in their slots beside data: numbers, in one step.

use crate::collective::channel::Channel;
use crate::error::Result;
use crate::transport::{Phase, WaitContext};

/// The most numbers that a rank can tell.
pub(super) fn max_words(channel: &Channel) -> usize {
    channel.shm.region().layout().slot / size_of::<u64>() - 1
}

/// Tells the other ranks of the host `mine`, at most [`most`] numbers, and calls `hear` with what every rank told, by local
/// rank. All ranks of the host come here at the same point.
pub(super) fn allgather_u64<T>(
    channel: &mut Channel,
    mine: &[u64],
    wait_ctx: &WaitContext<'_>,
    hear: impl FnOnce(&[&[u64]]) -> Result<T>,
) -> Result<T> {
    debug_assert!(mine.len() <= max_words(channel));
    let most = max_words(channel);
    let step = channel.begin_round(wait_ctx)?;
    let (local_rank, local_size) = (channel.topology.local_rank(), channel.topology.local_size());
    let slot = channel.shm.slot(local_rank, step).cast::<u64>();
    // SAFETY: `begin` waited until the slot is this rank's; it has room, and is aligned to cache lines.
    unsafe {
        slot.write(mine.len() as u64);
        slot.add(1).copy_from_nonoverlapping(mine.as_ptr(), mine.len());
    }
    channel.shm.raise(Phase::Packed, step);
    channel.shm.wait(Phase::Packed, step, local_size, wait_ctx)?;
    let texts: Vec<&[u64]> = (channel.shm.slots(step).iter())
        .map(|slot| {
            let slot = slot.cast::<u64>().cast_const();
            // SAFETY: all have packed, and nobody writes before all have unpacked; the length is checked.
            unsafe { std::slice::from_raw_parts(slot.add(1), usize::try_from(*slot).unwrap_or(0).min(most)) }
        })
        .collect();
    let heard = hear(&texts);
    channel.finish_round(step);
    heard
}
