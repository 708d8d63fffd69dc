//! Rounds in which all ranks tell each other a text, and every rank gets what is made of all of them: how ranks that are
//! out of agreement speak, since they still go through the same steps.
//!
//! The ranks of a host put their texts into their slots; the driver of shard 0 collects them, exchanges the host's with the
//! other hosts, and leaves what it makes of all in its own slot. Every host makes the same of the same texts.
//! Thread rule: as for [`Channel`].

use std::slice;

use super::channel::Channel;
use super::inter_host::InterHost;
use crate::error::Result;
use crate::transport::{Message, Phase, WaitContext};
use crate::wire_layout::{ALIGN, HEADER};

/// What the ranks told in a round: rank and text, in the order of ranks.
pub(super) type RankTexts = [(usize, String)];

/// No text is longer than that: hundreds of calls, and the driver of a shard holds the texts of all ranks.
const MAX_TEXT_BYTES: usize = 16 << 10;

/// The longest text of a rank that fits a slot: the same number on every rank.
pub(super) fn max_text_bytes(channel: &Channel) -> usize {
    MAX_TEXT_BYTES.min(channel.shm.region().layout().slot / 4)
}

/// All ranks tell `mine`; returns what `merge` makes of that, by rank, on shard 0.
pub(super) fn allgather_merge(
    channel: &mut Channel,
    mine: &str,
    wait_ctx: &WaitContext<'_>,
    merge: impl FnOnce(&RankTexts) -> String,
) -> Result<String> {
    let local_size = channel.topology.local_size();
    let local_rank = channel.topology.local_rank();
    let step = channel.begin_round(wait_ctx)?;
    // Each rank's text lies in the first half of its slot, the result in the second half of the first.
    let half = channel.shm.region().layout().slot / 2;

    // SAFETY: `begin` waited until the slot is this rank's.
    unsafe { write_text(channel.shm.slot(local_rank, step), half, mine) };
    channel.shm.raise(Phase::Packed, step);
    channel.shm.wait(Phase::Packed, step, local_size, wait_ctx)?;

    if channel.topology.shard() == Some(0) {
        let mut texts = Vec::new();
        for (local, &rank) in channel.topology.local_ranks().iter().enumerate() {
            // SAFETY: all have packed; only this rank goes on before it has reduced.
            texts.push((rank, unsafe { read_text(channel.shm.slot(local, step), half) }));
        }
        texts.extend(from_other_hosts(channel, &texts, wait_ctx)?);
        texts.sort_by_key(|(rank, _)| *rank);
        // SAFETY: the second half of the own slot is nobody else's before `Reduced`.
        unsafe { write_text(channel.shm.slot(local_rank, step).add(half), half, &merge(&texts)) };
    }
    if channel.topology.shard().is_some() {
        channel.shm.raise(Phase::Reduced, step);
    }
    channel.shm.wait(Phase::Reduced, step, channel.topology.num_shards(), wait_ctx)?;
    // SAFETY: all have reduced, so the slots are read-only.
    let text = unsafe { read_text(channel.shm.slot(0, step).add(half), half) };
    channel.finish_round(step);
    Ok(text)
}

/// Exchanges what the ranks of this host told with the other hosts, in as many messages as the longest takes.
fn from_other_hosts(
    channel: &mut Channel,
    texts: &RankTexts,
    wait_ctx: &WaitContext<'_>,
) -> Result<Vec<(usize, String)>> {
    let Some(InterHost { link, .. }) = &mut channel.inter_host else { return Ok(Vec::new()) };
    let bytes = encode(texts);
    let hosts: Vec<usize> = (0..channel.topology.hosts()).filter(|&host| host != channel.topology.host()).collect();
    // One message goes to all, and there is room for one of each.
    let room = link.buffers(0).recv.len() / hosts.len() / ALIGN * ALIGN;
    let place = |(place, &host)| Message { host, bytes: place * room..(place + 1) * room };
    let receives: Vec<Message> = hosts.iter().enumerate().map(place).collect();
    let mut texts = vec![Vec::new(); hosts.len()];
    let mut sent = 0;
    loop {
        let message = &mut link.buffers(0).send[..room];
        let part = &bytes[sent..bytes.len().min(sent + room - HEADER)];
        sent += part.len();
        // How much of this host's is in the message, and how much is left.
        message[0..8].copy_from_slice(&(part.len() as u64).to_le_bytes());
        message[8..16].copy_from_slice(&((bytes.len() - sent) as u64).to_le_bytes());
        message[HEADER..HEADER + part.len()].copy_from_slice(part);
        let len = HEADER + part.len();
        let sends: Vec<Message> = hosts.iter().map(|&host| Message { host, bytes: 0..len }).collect();
        link.start(0, &sends, &receives)?;
        link.finish(0, wait_ctx)?;
        let mut last = sent == bytes.len();
        for (received, text) in receives.iter().zip(&mut texts) {
            let message = &link.buffers(0).recv[received.bytes.clone()];
            let number = |at: usize| {
                let mut bytes = [0; 8];
                bytes.copy_from_slice(&message[at..at + 8]);
                usize::try_from(u64::from_le_bytes(bytes)).unwrap_or(0)
            };
            text.extend_from_slice(&message[HEADER..HEADER + number(0).min(room - HEADER)]);
            last &= number(8) == 0;
        }
        if last {
            return Ok(texts.iter().flat_map(|text| decode(text)).collect());
        }
    }
}

/// # Safety
/// `capacity` bytes at `at` are the caller's to write.
unsafe fn write_text(at: *mut u8, capacity: usize, text: &str) {
    let len = text.floor_char_boundary(capacity - 8);
    // SAFETY: the caller's promise.
    let bytes = unsafe { slice::from_raw_parts_mut(at, 8 + len) };
    bytes[..8].copy_from_slice(&(len as u64).to_le_bytes());
    bytes[8..].copy_from_slice(&text.as_bytes()[..len]);
}

/// # Safety
/// `capacity` bytes at `at` were written by `write_text` and are read-only.
unsafe fn read_text(at: *const u8, capacity: usize) -> String {
    // SAFETY: the caller's promise.
    let bytes = unsafe { slice::from_raw_parts(at, capacity) };
    let mut len = [0; 8];
    len.copy_from_slice(&bytes[..8]);
    let len = usize::try_from(u64::from_le_bytes(len)).unwrap_or(0).min(capacity - 8);
    String::from_utf8_lossy(&bytes[8..8 + len]).into_owned()
}

/// `rank NUL text NUL` for each rank.
fn encode(texts: &RankTexts) -> Vec<u8> {
    texts.iter().flat_map(|(rank, text)| format!("{rank}\0{text}\0").into_bytes()).collect()
}

fn decode(bytes: &[u8]) -> Vec<(usize, String)> {
    let text = String::from_utf8_lossy(bytes);
    let fields: Vec<&str> = text.split('\0').collect();
    fields.chunks_exact(2).filter_map(|pair| Some((pair[0].parse().ok()?, pair[1].to_owned()))).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn texts_travel() {
        let texts = vec![(3, "barrier".to_owned()), (4, String::new())];
        assert_eq!(decode(&encode(&texts)), texts);
    }
}
