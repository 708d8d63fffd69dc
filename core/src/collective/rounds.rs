//! Rounds in which all ranks tell each other a text, and every rank gets what is made of all of them: how ranks that are
//! out of agreement speak, since they still go through the same steps.
//!
//! The ranks of a host put their texts into their slots; the driver of lane 0 collects them, exchanges the host's with the
//! other hosts, and leaves what it makes of all in its own slot. Every host makes the same of the same texts.
//! Thread rule: as for [`Channel`].

use std::slice;

use super::Channel;
use crate::error::Result;
use crate::plan::HEADER;
use crate::transport::{Out, Patience, Phase};

/// What the ranks told in a round: rank and text, in the order of ranks.
pub(super) type Told = [(usize, String)];

/// The longest text of a rank that fits a slot and, with those of its host, a message: the same number on every rank.
pub(super) fn limit(channel: &Channel) -> usize {
    let slot = channel.node.node().geometry().slot / 4;
    let topology = &channel.topology;
    let most = (0..topology.hosts()).map(|host| topology.ranks_of(host).len()).max().unwrap_or(1);
    let capacity = channel.message_capacity();
    // A rank's number and the separators take the rest of its share.
    slot.min((capacity / most).saturating_sub(24))
}

/// All ranks tell `mine`; returns what `merge` makes of that, by rank, on lane 0.
pub(super) fn round(
    channel: &mut Channel,
    mine: &str,
    patience: &Patience<'_>,
    merge: impl FnOnce(&Told) -> String,
) -> Result<String> {
    let local_size = channel.topology.local_size();
    let local_rank = channel.topology.local_rank();
    let step = channel.begin(patience)?;
    // Each rank's text lies in the first half of its slot, the result in the second half of the first.
    let half = channel.node.node().geometry().slot / 2;

    // SAFETY: `begin` waited until the slot is this rank's.
    unsafe { write_text(channel.node.slot(local_rank, step), half, mine) };
    channel.node.raise(Phase::Packed, step);
    channel.node.wait(Phase::Packed, step, local_size, patience)?;

    if channel.topology.lane() == Some(0) {
        let mut told = Vec::new();
        for (local, &rank) in channel.topology.local_ranks().iter().enumerate() {
            // SAFETY: all have packed; only this rank goes on before it has reduced.
            told.push((rank, unsafe { read_text(channel.node.slot(local, step), half) }));
        }
        told.extend(from_other_hosts(channel, &told, patience)?);
        told.sort_by_key(|(rank, _)| *rank);
        // SAFETY: the second half of the own slot is nobody else's before `Reduced`.
        unsafe { write_text(channel.node.slot(local_rank, step).add(half), half, &merge(&told)) };
    }
    if channel.topology.lane().is_some() {
        channel.node.raise(Phase::Reduced, step);
    }
    channel.node.wait(Phase::Reduced, step, channel.topology.lanes(), patience)?;
    // SAFETY: all have reduced, so the slots are read-only.
    let text = unsafe { read_text(channel.node.slot(0, step).add(half), half) };
    channel.node.raise(Phase::Unpacked, step);
    Ok(text)
}

/// Exchanges what the ranks of this host told with the other hosts.
fn from_other_hosts(channel: &mut Channel, told: &Told, patience: &Patience<'_>) -> Result<Vec<(usize, String)>> {
    let Some(link) = &mut channel.link else { return Ok(Vec::new()) };
    let bytes = encode(told);
    let message = link.message_to_all();
    let capacity = message.len() - HEADER;
    let len = bytes.len().min(capacity);
    message[0..8].copy_from_slice(&(len as u64).to_le_bytes());
    message[HEADER..HEADER + len].copy_from_slice(&bytes[..len]);
    link.exchange(Out::Same(HEADER + len), patience)?;
    let mut others = Vec::new();
    for host in (0..channel.topology.hosts()).filter(|&host| host != channel.topology.host()) {
        let message = link.message_from(host);
        let mut len = [0; 8];
        len.copy_from_slice(&message[0..8]);
        let len = usize::try_from(u64::from_le_bytes(len)).unwrap_or(0).min(capacity);
        others.extend(decode(&message[HEADER..HEADER + len]));
    }
    Ok(others)
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
fn encode(told: &Told) -> Vec<u8> {
    told.iter().flat_map(|(rank, text)| format!("{rank}\0{text}\0").into_bytes()).collect()
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
        let told = vec![(3, "barrier".to_owned()), (4, String::new())];
        assert_eq!(decode(&encode(&told)), told);
    }
}
