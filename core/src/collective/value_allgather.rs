//! All-gather of small values; a function merges them, and every rank gets its result. Works after a mismatch, because
//! the protocol does not depend on the call.
//!
//! The ranks of a host write their values to their slots. The owner of shard 0 collects them, exchanges them with the
//! other hosts ([`exchange`]), and writes the result to its slot. All hosts compute the same result from the same values.
//! Thread rule: that of [`Channel`].

use std::collections::BTreeMap;
use std::slice;

use serde::Serialize;
use serde::de::DeserializeOwned;

use super::channel::Channel;
use super::inter_host::InterHost;
use crate::codec::{decode, encode};
use crate::error::{Error, Result};
use crate::transport::{HostLink, HostMessage, WaitContext, finish_exchange};
use crate::wire_layout::HEADER;

/// Maximum encoded bytes of a rank's value, enough for hundreds of calls. A shard owner holds the values of all ranks.
const MAX_VALUE_BYTES: usize = 16 << 10;

/// Ranks in ascending order: runs from a first rank to one past the last.
type Runs = Vec<(usize, usize)>;
/// The encoded values of some ranks; equal values are one entry, so the size follows the number of different values.
type Values = BTreeMap<Vec<u8>, Runs>;

/// Maximum encoded bytes of a rank's value, the same on every rank. The result may have twice as many.
pub(super) fn max_value_bytes(channel: &Channel) -> usize {
    MAX_VALUE_BYTES.min(channel.region().layout().slot / 4)
}

/// Returns the result of `merge` on every rank. `merge` gets the values of all ranks in rank order and runs on the
/// owners of shard 0.
///
/// # Errors
/// [`Error::Internal`] on all ranks if a value or the result is too long; those of the transports.
pub(super) fn allgather_merge<T: Serialize + DeserializeOwned + Clone, R: Serialize + DeserializeOwned>(
    channel: &mut Channel,
    value: &T,
    wait_ctx: &WaitContext<'_>,
    merge: impl FnOnce(Vec<T>) -> R,
) -> Result<R> {
    let local_rank = channel.topology.local_rank();
    let open = channel.rounds.begin(wait_ctx)?;
    // A rank's value is in the first half of its slot, the result in the second half of the first rank's slot.
    let half = channel.region().layout().slot / 2;

    let value = encode(value).unwrap_or_default();
    open.reserve(&channel.rounds, 0..(8 + value.len()).min(half))?;
    // SAFETY: the round is open, so this rank owns the slot.
    unsafe { write_bytes(channel.rounds.slots(open, 0)[local_rank], half, &value) };
    let all_packed = open.pack_values(&channel.rounds).wait(&channel.rounds, wait_ctx)?;

    if local_rank == 0 {
        let mut values = Values::new();
        for (local, &rank) in channel.topology.local_ranks().iter().enumerate() {
            // SAFETY: all ranks have packed; they wait until this rank has reduced.
            add(
                &mut values,
                unsafe { read_bytes(channel.rounds.slots(all_packed, 0)[local], half) },
                vec![(rank, rank + 1)],
            );
        }
        // The first rank of a host owns shard 0.
        if let Some(InterHost { link, .. }) = channel.inter_host.first_mut() {
            let (host, hosts) = (channel.topology.host(), channel.topology.hosts());
            values = exchange(values, link.as_mut(), host, hosts, wait_ctx)?;
        }
        let result = encode(&by_rank(&values, channel.topology.size()).map(merge)).unwrap_or_default();
        open.reserve(&channel.rounds, half..half + (8 + result.len()).min(half))?;
        // SAFETY: no other rank accesses the second half of this slot before `Reduced`.
        unsafe { write_bytes(channel.rounds.slots(all_packed, 0)[local_rank].add(half), half, &result) };
    }
    let reduced = match channel.topology.owns_shards() {
        true => all_packed.post_reduced(&channel.rounds),
        false => all_packed.reduces_nothing(&channel.rounds),
    };
    let all_reduced = reduced.wait(&channel.rounds, channel.topology.num_owners(), wait_ctx)?;
    // SAFETY: all have reduced, so the slots are read-only.
    let result = unsafe { read_bytes(channel.rounds.slots(all_reduced, 0)[0].add(half), half) };
    all_reduced.end(&mut channel.rounds);
    decode::<Option<R>>(&result)?.ok_or_else(|| Error::Internal("cannot decode what the ranks exchanged".into()))
}

/// Adds the value of the ranks `runs`.
fn add(values: &mut Values, value: Vec<u8>, runs: Runs) {
    let all = values.entry(value).or_default();
    all.extend(runs);
    all.sort_unstable();
    all.dedup_by(|next, kept| {
        let joins = next.0 <= kept.1;
        if joins {
            kept.1 = kept.1.max(next.1);
        }
        joins
    });
}

/// The values of ranks 0 to `ranks` - 1; `None` if one is missing or cannot be decoded.
fn by_rank<T: DeserializeOwned + Clone>(values: &Values, ranks: usize) -> Option<Vec<T>> {
    let mut all: Vec<Option<T>> = vec![None; ranks];
    for (bytes, runs) in values {
        let value: T = decode(bytes).ok()?;
        for &(first, end) in runs {
            all.get_mut(first..end)?.fill(Some(value.clone()));
        }
    }
    all.into_iter().collect()
}

/// The values of all hosts. In round k a host sends what it has to the host 2^k after it, and receives from the one 2^k
/// before it: after log2(`hosts`) rounds, rounded up, it has everything (dissemination; Hensgen, Finkel and Manber, 1988).
/// A passed deadline names the host that this one waits for, which may itself wait for another.
fn exchange(
    mut values: Values,
    link: &mut dyn HostLink,
    host: usize,
    hosts: usize,
    wait_ctx: &WaitContext<'_>,
) -> Result<Values> {
    let mut distance = 1;
    while distance < hosts {
        let (to, from) = ((host + distance) % hosts, (host + hosts - distance) % hosts);
        let received: Values = decode(&send_receive(link, &encode(&values)?, to, from, wait_ctx)?)?;
        received.into_iter().for_each(|(value, runs)| add(&mut values, value, runs));
        distance *= 2;
    }
    Ok(values)
}

/// Sends `bytes` to host `to`, and returns what host `from` sends. Each message has the length of its part, and how many
/// bytes follow in others.
fn send_receive(
    link: &mut dyn HostLink,
    bytes: &[u8],
    to: usize,
    from: usize,
    wait_ctx: &WaitContext<'_>,
) -> Result<Vec<u8>> {
    let capacity = link.buffers(0).send.len();
    let mut parts = bytes.chunks(capacity - HEADER);
    let (mut sent, mut received, mut receives) = (0, Vec::new(), true);
    loop {
        let part = parts.next();
        let message = part.map(|part| {
            sent += part.len();
            let message = &mut *link.buffers(0).send;
            message[0..8].copy_from_slice(&(part.len() as u64).to_le_bytes());
            message[8..16].copy_from_slice(&((bytes.len() - sent) as u64).to_le_bytes());
            message[HEADER..HEADER + part.len()].copy_from_slice(part);
            HostMessage { host: to, bytes: 0..HEADER + part.len() }
        });
        let room = receives.then_some(HostMessage { host: from, bytes: 0..capacity });
        if message.is_none() && room.is_none() {
            return Ok(received);
        }
        link.start(0, message.as_slice(), room.as_slice())?;
        finish_exchange(link, 0, wait_ctx)?;
        if receives {
            let message = &*link.buffers(0).recv;
            let number = |at: usize| {
                let mut bytes = [0; 8];
                bytes.copy_from_slice(&message[at..at + 8]);
                usize::try_from(u64::from_le_bytes(bytes)).unwrap_or(0)
            };
            received.extend_from_slice(&message[HEADER..HEADER + number(0).min(capacity - HEADER)]);
            receives = number(8) > 0;
        }
    }
}

/// Writes the length and `bytes`; an empty value if they do not fit.
///
/// # Safety
/// The caller owns `capacity` bytes at `at`.
unsafe fn write_bytes(at: *mut u8, capacity: usize, bytes: &[u8]) {
    let bytes = if bytes.len() <= capacity - 8 { bytes } else { &[] };
    // SAFETY: the caller's promise.
    let out = unsafe { slice::from_raw_parts_mut(at, 8 + bytes.len()) };
    out[..8].copy_from_slice(&(bytes.len() as u64).to_le_bytes());
    out[8..].copy_from_slice(bytes);
}

/// # Safety
/// `write_bytes` wrote `capacity` bytes at `at`, which are now read-only.
unsafe fn read_bytes(at: *const u8, capacity: usize) -> Vec<u8> {
    // SAFETY: the caller's promise.
    let bytes = unsafe { slice::from_raw_parts(at, capacity) };
    let mut len = [0; 8];
    len.copy_from_slice(&bytes[..8]);
    let len = usize::try_from(u64::from_le_bytes(len)).unwrap_or(0).min(capacity - 8);
    bytes[8..8 + len].to_vec()
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn every_rank_keeps_its_value(all in prop::collection::vec(0u8..3, 1..20), order in any::<u64>()) {
            let mut ranks: Vec<usize> = (0..all.len()).collect();
            ranks.sort_by_key(|&rank| order.rotate_left(rank as u32 * 7) ^ rank as u64);
            let mut values = Values::new();
            // A value may come twice.
            for rank in ranks.iter().chain(&ranks[..ranks.len() / 2]) {
                add(&mut values, vec![all[*rank]], vec![(*rank, rank + 1)]);
            }
            prop_assert_eq!(by_rank::<u8>(&values, all.len()), Some(all.clone()));
            prop_assert_eq!(by_rank::<u8>(&values, all.len() + 1), None);
            prop_assert!(values.values().flat_map(|runs| runs.windows(2)).all(|runs| runs[0].1 < runs[1].0));
        }
    }
}
