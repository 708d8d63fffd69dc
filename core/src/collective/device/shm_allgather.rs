//! All-gather of words among the ranks of a host, through their slots, in one round.

use crate::collective::channel::Channel;
use crate::error::Result;
use crate::transport::WaitContext;

/// Maximum number of words of a rank.
pub(super) fn max_words(channel: &Channel) -> usize {
    channel.region().layout().slot / size_of::<u64>() - 1
}

/// Shares `local`, at most [`max_words`] words, with the other ranks of the host, and calls `apply` with the words of
/// all ranks, by local rank. Collective over the ranks of the host.
pub(super) fn allgather_u64<T>(
    channel: &mut Channel,
    local: &[u64],
    wait_ctx: &WaitContext<'_>,
    apply: impl FnOnce(&[&[u64]]) -> Result<T>,
) -> Result<T> {
    debug_assert!(local.len() <= max_words(channel));
    let max_words = max_words(channel);
    let open = channel.rounds.begin(wait_ctx)?;
    open.reserve(&channel.rounds, 0..(local.len() + 1) * size_of::<u64>())?;
    let slot = channel.rounds.slots(open, 0)[channel.topology.local_rank()].cast::<u64>();
    // SAFETY: the round is open, so this rank owns the slot, which has room and is aligned to cache lines.
    unsafe {
        slot.write(local.len() as u64);
        slot.add(1).copy_from_nonoverlapping(local.as_ptr(), local.len());
    }
    let all_packed = open.pack_values(&channel.rounds).wait(&channel.rounds, wait_ctx)?;
    let words: Vec<&[u64]> = (channel.rounds.slots(all_packed, 0).iter())
        .map(|slot| {
            let slot = slot.cast::<u64>().cast_const();
            // SAFETY: all ranks have packed, and nobody writes before all have unpacked; the length is checked.
            unsafe { std::slice::from_raw_parts(slot.add(1), usize::try_from(*slot).unwrap_or(0).min(max_words)) }
        })
        .collect();
    let result = apply(&words);
    all_packed.end(&mut channel.rounds);
    result
}
