//! All-gather of small values; a function merges them, and every rank gets its result. Works after a mismatch, because
//! the protocol does not depend on the call.
//!
//! The ranks of a host write their values to their slots. The owner of shard 0 collects them, exchanges them with the
//! other hosts, and writes the result to its slot. All hosts compute the same result from the same values.
//! Thread rule: that of [`Channel`].

use std::slice;

use serde::Serialize;
use serde::de::DeserializeOwned;

use super::channel::Channel;
use super::inter_host::InterHost;
use crate::codec::{decode, encode};
use crate::error::{Error, Result};
use crate::transport::{Message, Phase, WaitContext, finish_exchange};
use crate::wire_layout::{ALIGN, HEADER};

/// Maximum encoded bytes of a rank's value, enough for hundreds of calls. A shard owner holds the values of all ranks.
const MAX_VALUE_BYTES: usize = 16 << 10;

/// Maximum encoded bytes of a rank's value, the same on every rank. The result may have twice as many.
pub(super) fn max_value_bytes(channel: &Channel) -> usize {
    MAX_VALUE_BYTES.min(channel.shm.region().layout().slot / 4)
}

/// Returns the result of `merge` on every rank. `merge` gets the values of all ranks in rank order and runs on the
/// owners of shard 0.
///
/// # Errors
/// [`Error::Internal`] on all ranks if a value or the result is too long; those of the transports.
pub(super) fn allgather_merge<T: Serialize + DeserializeOwned, R: Serialize + DeserializeOwned>(
    channel: &mut Channel,
    value: &T,
    wait_ctx: &WaitContext<'_>,
    merge: impl FnOnce(Vec<T>) -> R,
) -> Result<R> {
    let local_size = channel.topology.local_size();
    let local_rank = channel.topology.local_rank();
    let seq = channel.begin_round(wait_ctx)?;
    // A rank's value is in the first half of its slot, the result in the second half of the first rank's slot.
    let half = channel.shm.region().layout().slot / 2;

    // SAFETY: `begin_round` waited until this rank owns the slot.
    unsafe { write_bytes(channel.shm.slot(local_rank, seq), half, &encode(value).unwrap_or_default()) };
    channel.shm.raise(Phase::Packed, seq);
    channel.shm.wait(Phase::Packed, seq, local_size, wait_ctx)?;

    if channel.topology.local_rank() == 0 {
        let mut values = Vec::new();
        for (local, &rank) in channel.topology.local_ranks().iter().enumerate() {
            // SAFETY: all ranks have packed; they wait until this rank has reduced.
            values.push((rank, unsafe { read_bytes(channel.shm.slot(local, seq), half) }));
        }
        values.extend(from_other_hosts(channel, &values, wait_ctx)?);
        values.sort_by_key(|(rank, _)| *rank);
        let values: Option<Vec<T>> = values.iter().map(|(_, bytes)| decode(bytes).ok()).collect();
        let result = encode(&values.map(merge)).unwrap_or_default();
        // SAFETY: no other rank accesses the second half of this slot before `Reduced`.
        unsafe { write_bytes(channel.shm.slot(local_rank, seq).add(half), half, &result) };
    }
    if channel.topology.owns_shards() {
        channel.shm.raise(Phase::Reduced, seq);
    }
    channel.shm.wait(Phase::Reduced, seq, channel.topology.num_owners(), wait_ctx)?;
    // SAFETY: all have reduced, so the slots are read-only.
    let result = unsafe { read_bytes(channel.shm.slot(0, seq).add(half), half) };
    channel.finish_round(seq);
    decode::<Option<R>>(&result)?.ok_or_else(|| Error::Internal("cannot decode what the ranks exchanged".into()))
}

/// Exchanges this host's values with the other hosts. All send as many messages as the longest host needs.
fn from_other_hosts(
    channel: &mut Channel,
    values: &[(usize, Vec<u8>)],
    wait_ctx: &WaitContext<'_>,
) -> Result<Vec<(usize, Vec<u8>)>> {
    // The first rank of a host owns shard 0.
    let Some(InterHost { link, .. }) = channel.inter_host.first_mut() else { return Ok(Vec::new()) };
    let bytes = encode(values)?;
    let hosts: Vec<usize> = (0..channel.topology.hosts()).filter(|&host| host != channel.topology.host()).collect();
    // All hosts get the same message, and the receive buffer has room for one from each.
    let capacity = link.buffers(0).recv.len() / hosts.len() / ALIGN * ALIGN;
    let offset = |(offset, &host)| Message { host, bytes: offset * capacity..(offset + 1) * capacity };
    let receives: Vec<Message> = hosts.iter().enumerate().map(offset).collect();
    let mut received_bytes = vec![Vec::new(); hosts.len()];
    let mut sent = 0;
    loop {
        let message = &mut link.buffers(0).send[..capacity];
        let part = &bytes[sent..bytes.len().min(sent + capacity - HEADER)];
        sent += part.len();
        // Length of the data in the message, and bytes that remain.
        message[0..8].copy_from_slice(&(part.len() as u64).to_le_bytes());
        message[8..16].copy_from_slice(&((bytes.len() - sent) as u64).to_le_bytes());
        message[HEADER..HEADER + part.len()].copy_from_slice(part);
        let len = HEADER + part.len();
        let sends: Vec<Message> = hosts.iter().map(|&host| Message { host, bytes: 0..len }).collect();
        link.start(0, &sends, &receives)?;
        finish_exchange(link.as_mut(), 0, wait_ctx)?;
        let mut last = sent == bytes.len();
        for (received, bytes) in receives.iter().zip(&mut received_bytes) {
            let message = &link.buffers(0).recv[received.bytes.clone()];
            let number = |at: usize| {
                let mut bytes = [0; 8];
                bytes.copy_from_slice(&message[at..at + 8]);
                usize::try_from(u64::from_le_bytes(bytes)).unwrap_or(0)
            };
            bytes.extend_from_slice(&message[HEADER..HEADER + number(0).min(capacity - HEADER)]);
            last &= number(8) == 0;
        }
        if last {
            let values: Vec<Vec<(usize, Vec<u8>)>> =
                received_bytes.iter().map(|bytes| decode(bytes)).collect::<Result<_>>()?;
            return Ok(values.into_iter().flatten().collect());
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
