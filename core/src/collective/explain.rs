//! After a mismatch: all ranks tell each other what they called, and every rank makes the same text of it.
//!
//! The ranks of a host put their descriptions into their slots; the driver of lane 0 collects them, exchanges the host's
//! with the other hosts, and leaves the whole in its own slot.

use std::fmt::Write;
use std::slice;

use super::{Channel, Job};
use crate::error::{Error, Result};
use crate::plan::HEADER;
use crate::transport::{Out, Patience, Phase};

/// How many differing tensors a message shows.
const SHOWN: usize = 8;

/// The mismatch as an error; or the error that kept the ranks from finding out about it.
pub(super) fn explain(channel: &mut Channel, job: &Job, patience: &Patience<'_>) -> Error {
    match exchange(channel, job, patience) {
        Ok(text) => Error::Mismatch(text),
        Err(error) => error,
    }
}

fn exchange(channel: &mut Channel, job: &Job, patience: &Patience<'_>) -> Result<String> {
    let local_size = channel.topology.local_size();
    let local_rank = channel.topology.local_rank();
    let step = channel.begin(patience)?;
    // Descriptions lie in the first half of each slot, the whole in the second half of the first.
    let half = channel.node.node().geometry().slot / 2;

    let mine = job.describe(half / 2);
    // SAFETY: `begin` waited until the slot is this rank's.
    unsafe { write_text(channel.node.slot(local_rank, step), half, &mine) };
    channel.node.raise(Phase::Packed, step);
    channel.node.wait(Phase::Packed, step, local_size, patience)?;

    if channel.topology.lane() == Some(0) {
        let mut told = Vec::new();
        for (local, &rank) in channel.topology.local_ranks().iter().enumerate() {
            // SAFETY: all have packed; only this rank goes on before it has reduced.
            told.push((rank, unsafe { read_text(channel.node.slot(local, step), half) }));
        }
        if let Some(link) = &mut channel.link {
            let capacity = link.message_to_all().len() - HEADER;
            let bytes = encode(&told, capacity);
            let message = link.message_to_all();
            message[0..8].copy_from_slice(&(bytes.len() as u64).to_le_bytes());
            message[HEADER..HEADER + bytes.len()].copy_from_slice(&bytes);
            link.exchange(Out::Same(HEADER + bytes.len()), patience)?;
            for host in (0..channel.topology.hosts()).filter(|&host| host != channel.topology.host()) {
                let message = link.message_from(host);
                let mut len = [0; 8];
                len.copy_from_slice(&message[0..8]);
                let len = usize::try_from(u64::from_le_bytes(len)).unwrap_or(0).min(capacity);
                told.extend(decode(&message[HEADER..HEADER + len]));
            }
        }
        told.sort_by_key(|(rank, _)| *rank);
        // SAFETY: the second half of the own slot is nobody else's before `Reduced`.
        unsafe { write_text(channel.node.slot(local_rank, step).add(half), half, &compare(&told)) };
        channel.node.raise(Phase::Reduced, step);
    } else if channel.topology.lane().is_some() {
        channel.node.raise(Phase::Reduced, step);
    }
    channel.node.wait(Phase::Reduced, step, channel.topology.lanes(), patience)?;
    // SAFETY: all have reduced, so the slots are read-only.
    let text = unsafe { read_text(channel.node.slot(0, step).add(half), half) };
    channel.node.raise(Phase::Unpacked, step);
    Ok(text)
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

/// `rank NUL text NUL` for each rank, the texts cut so that all fit.
fn encode(told: &[(usize, String)], capacity: usize) -> Vec<u8> {
    let share = (capacity / told.len().max(1)).saturating_sub(24);
    let mut bytes = Vec::new();
    for (rank, text) in told {
        let text = &text[..text.floor_char_boundary(share)];
        bytes.extend(format!("{rank}\0{text}\0").bytes());
    }
    bytes.truncate(capacity);
    bytes
}

fn decode(bytes: &[u8]) -> Vec<(usize, String)> {
    let text = String::from_utf8_lossy(bytes);
    let fields: Vec<&str> = text.split('\0').collect();
    fields.chunks_exact(2).filter_map(|pair| Some((pair[0].parse().ok()?, pair[1].to_owned()))).collect()
}

/// The descriptions side by side: ranks that said the same together, tensors only where they differ.
fn compare(told: &[(usize, String)]) -> String {
    let mut groups: Vec<(Vec<usize>, &str)> = Vec::new();
    for (rank, text) in told {
        match groups.iter_mut().find(|(_, other)| other == text) {
            Some((ranks, _)) => ranks.push(*rank),
            None => groups.push((vec![*rank], text)),
        }
    }
    let longest = groups.iter().map(|(_, text)| text.lines().count()).max().unwrap_or(0);
    let differ = |line: usize| groups.iter().any(|(_, text)| text.lines().nth(line) != groups[0].1.lines().nth(line));
    let lines: Vec<usize> = (1..longest).filter(|&line| differ(line)).take(SHOWN).collect();
    let mut out = String::new();
    for (ranks, text) in &groups {
        let title = text.lines().next().unwrap_or("");
        // Writing to a String cannot fail.
        let _infallible = writeln!(out, "  {}: {title}", list(ranks));
        for &line in &lines {
            let _infallible = writeln!(out, "    {}", text.lines().nth(line).unwrap_or("(no further tensor)"));
        }
    }
    out.truncate(out.trim_end().len());
    out
}

/// `rank 3`, `ranks 0, 1, 2`, and for many `ranks 0, 1, … 9 (10 ranks)`.
fn list(ranks: &[usize]) -> String {
    let words = |ranks: &[usize]| ranks.iter().map(usize::to_string).collect::<Vec<_>>().join(", ");
    match ranks {
        [rank] => format!("rank {rank}"),
        [first @ .., last] if ranks.len() > 16 => {
            format!("ranks {}, … {last} ({} ranks)", words(&first[..8]), ranks.len())
        }
        _ => format!("ranks {}", words(ranks)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_what_differs_is_shown() {
        let told = [
            (0, "average 'a' of 2 tensors\ntensor 0: float32[3]\ntensor 1: float32[4]".to_owned()),
            (1, "average 'a' of 2 tensors\ntensor 0: float32[3]\ntensor 1: float32[5]".to_owned()),
            (2, "average 'a' of 2 tensors\ntensor 0: float32[3]\ntensor 1: float32[4]".to_owned()),
        ];
        assert_eq!(
            compare(&told),
            "  ranks 0, 2: average 'a' of 2 tensors\n    tensor 1: float32[4]\n  \
             rank 1: average 'a' of 2 tensors\n    tensor 1: float32[5]"
        );
    }

    #[test]
    fn descriptions_travel_cut_to_the_message() {
        let told = vec![(3, "barrier".to_owned()), (4, "x".repeat(5000))];
        let back = decode(&encode(&told, 1024));
        assert_eq!(back[0], told[0]);
        assert_eq!(back[1].0, 4);
        assert!(back[1].1.len() > 400 && told[1].1.starts_with(&back[1].1));
    }
}
