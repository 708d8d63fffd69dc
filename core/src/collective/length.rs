//! The length of an all-to-all whose ranks know only their own pairs: before they move data they agree on the number of
//! chunks, and check that each pair expects what it is sent.

use serde::{Deserialize, Serialize};
use xxhash_rust::xxh3::xxh3_64;

use super::call::Call;
use super::channel::{Channel, out_of_sync};
use super::value_allgather::{allgather_merge, max_value_bytes};
use crate::error::{Error, Result};
use crate::transport::WaitContext;

/// A rank's blocks.
#[derive(Clone, Serialize, Deserialize)]
struct Lengths {
    /// Bytes of its longest block.
    longest: u64,
    /// The sum of a hash of (tensor, sender, receiver, elements) over its sends, minus that over its receives. These sums
    /// add up to 0 if each pair agrees.
    balance: u64,
}

impl Channel {
    /// Runs the first chunk of `call`, which checks that the calls match, as [`Channel::run_first_chunk`]. Before it, the
    /// ranks agree on the length if they must. A call on device memory moves no data here.
    ///
    /// # Errors
    /// As for [`Channel::run_first_chunk`]; [`Error::Mismatch`] if a rank is sent another number of elements than it
    /// expects.
    pub fn start_call(&mut self, call: &Call, wait_ctx: &WaitContext<'_>) -> Result<bool> {
        let on_device = call.producer().is_some();
        if !call.agrees_on_length() && !on_device {
            return self.run_first_chunk(call, wait_ctx);
        }
        // No data moves before all ranks are known to have the same call.
        if !self.run_first_chunk(&call.without_data(), wait_ctx)? {
            return Ok(false);
        }
        let total = if call.agrees_on_length() { agree_on_length(self, call, wait_ctx)? } else { 0 };
        if on_device {
            return Ok(true);
        }
        match self.run_first_chunk_of(call, total, wait_ctx)? {
            true => Ok(true),
            false => Err(out_of_sync(call, 0)),
        }
    }
}

/// Bytes of the longest block of a matched call with [`super::Counts::Pairs`]; the same on all ranks.
///
/// # Errors
/// [`Error::Mismatch`] on all ranks if a rank is sent another number of elements than it expects; those of the
/// transports.
fn agree_on_length(channel: &mut Channel, call: &Call, wait_ctx: &WaitContext<'_>) -> Result<usize> {
    let (me, ranks) = (channel.topology.rank(), channel.topology.size());
    let own = Lengths { longest: call.layout.total() as u64, balance: balance(call, me, ranks) };
    let merge = |all: Vec<Lengths>| Lengths {
        longest: all.iter().map(|lengths| lengths.longest).max().unwrap_or(0),
        balance: all.iter().fold(0, |sum, lengths| sum.wrapping_add(lengths.balance)),
    };
    let all = allgather_merge(channel, &own, wait_ctx, merge)?;
    if all.balance != 0 {
        let pairs = find_difference(channel, call, wait_ctx)?;
        return Err(Error::Mismatch(format!("{}: {pairs}; nothing was written", call.full_name())));
    }
    usize::try_from(all.longest).map_err(|_| Error::Internal("a block is longer than memory can be".into()))
}

fn balance(call: &Call, me: usize, ranks: usize) -> u64 {
    let hash = |numbers: [usize; 4]| xxh3_64(numbers.map(|number| (number as u64).to_le_bytes()).as_flattened());
    blocks(call, ranks).fold(0u64, |sum, (tensor, peer)| {
        let sent = hash([tensor, me, peer, call.sent(tensor, me, peer).len()]);
        let received = hash([tensor, peer, me, call.received(tensor, me, peer).len()]);
        sum.wrapping_add(sent).wrapping_sub(received)
    })
}

/// Each tensor with each peer.
fn blocks(call: &Call, ranks: usize) -> impl Iterator<Item = (usize, usize)> {
    (0..call.tensors(0).len()).flat_map(move |tensor| (0..ranks).map(move |peer| (tensor, peer)))
}

/// The first pair that differs, in words; without numbers if there are too many ranks or tensors to exchange all counts.
fn find_difference(channel: &mut Channel, call: &Call, wait_ctx: &WaitContext<'_>) -> Result<String> {
    /// Bytes of a count in an exchanged value, at most.
    const COUNT_BYTES: usize = 10;
    let (me, ranks) = (channel.topology.rank(), channel.topology.size());
    let tensors = call.tensors(0).len();
    let fits = 2 * ranks * tensors * COUNT_BYTES < max_value_bytes(channel);
    let rows: Vec<(usize, usize)> = blocks(call, if fits { ranks } else { 0 })
        .map(|(tensor, peer)| (call.sent(tensor, me, peer).len(), call.received(tensor, me, peer).len()))
        .collect();
    let merge = |rows: Vec<Vec<(usize, usize)>>| {
        let pairs = (0..ranks).flat_map(|sender| blocks(call, ranks).map(move |(tensor, peer)| (tensor, sender, peer)));
        let sizes = |(tensor, sender, receiver): (usize, usize, usize)| {
            let count = |rank: usize, peer: usize| rows.get(rank)?.get(tensor * ranks + peer);
            Some((count(sender, receiver)?.0, count(receiver, sender)?.1))
        };
        let mut sizes = pairs.filter_map(|pair| Some((pair, sizes(pair)?)));
        match sizes.find(|(_, (sent, expected))| sent != expected) {
            Some(((tensor, sender, receiver), (sent, expected))) => {
                let of = if tensors > 1 { format!(" of tensor {tensor}") } else { String::new() };
                format!("rank {sender} sends {sent} elements{of} to rank {receiver}, which expects {expected}")
            }
            None => "a rank sends another number of elements than its peer expects".to_owned(),
        }
    };
    allgather_merge(channel, &rows, wait_ctx, merge)
}
