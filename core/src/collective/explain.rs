//! After a mismatch: all ranks find out together where their calls differ, and every rank makes the same text of it.
//!
//! This goes in rounds. In each, the ranks of a host put a text into their slots; the driver of lane 0 collects them,
//! exchanges the host's with the other hosts, and leaves what it makes of all in its own slot. First the rounds narrow down,
//! by hashes, which tensors of long lists differ; then the ranks tell each other what these are.

use std::fmt::Write;
use std::ops::Range;
use std::slice;

use super::{Channel, Job};
use crate::error::{Error, Result};
use crate::plan::HEADER;
use crate::transport::{Out, Patience, Phase};

/// How many differing tensors a message shows.
const SHOWN: usize = 8;
/// Hexadecimal digits of a hash, and the space behind it.
const HASH: usize = 9;

/// What a rank told in a round.
type Told = [(usize, String)];

/// The mismatch as an error; or the error that kept the ranks from finding out about it.
pub(super) fn explain(channel: &mut Channel, job: &Job, patience: &Patience<'_>) -> Error {
    match find_out(channel, job, patience) {
        Ok(text) => Error::Mismatch(text),
        Err(error) => error,
    }
}

fn find_out(channel: &mut Channel, job: &Job, patience: &Patience<'_>) -> Result<String> {
    let limit = limit(channel);
    let length = round(channel, &job.tensors(0).len().to_string(), patience, |told| {
        told.iter().filter_map(|(_, text)| text.parse::<usize>().ok()).max().unwrap_or(0).to_string()
    })?;
    let mut range = 0..length.parse::<usize>().unwrap_or(0);
    while range.len() > SHOWN {
        let parts = (limit / HASH).clamp(2, 64);
        let mut hashes = String::new();
        for block in blocks(&range, parts) {
            hashes += &format!("{:08x} ", job.digest(block) >> 32);
        }
        let first = round(channel, &hashes, patience, first_difference)?;
        range = match first.parse::<usize>().ok().and_then(|index| blocks(&range, parts).nth(index)) {
            Some(block) => block,
            None => 0..0, // the tensors are the same
        };
    }
    round(channel, &job.describe(range, limit), patience, compare)
}

/// The longest text of a rank that fits a slot and, with those of its host, a message: the same number on every rank.
fn limit(channel: &Channel) -> usize {
    let slot = channel.node.node().geometry().slot / 4;
    let topology = &channel.topology;
    let most = (0..topology.hosts()).map(|host| topology.ranks_of(host).len()).max().unwrap_or(1);
    let capacity = channel.message_capacity();
    // A rank's number and the separators take the rest of its share.
    slot.min((capacity / most).saturating_sub(24))
}

fn blocks(range: &Range<usize>, parts: usize) -> impl Iterator<Item = Range<usize>> {
    let size = range.len().div_ceil(parts).max(1);
    let end = range.end;
    range.clone().step_by(size).map(move |start| start..(start + size).min(end))
}

/// The position of the first hash in which the ranks differ, or "none".
fn first_difference(told: &Told) -> String {
    let hashes = |text: &str| text.split(' ').map(str::to_owned).collect::<Vec<_>>();
    let all: Vec<Vec<String>> = told.iter().map(|(_, text)| hashes(text)).collect();
    let count = all.iter().map(Vec::len).max().unwrap_or(0);
    let differ = |&index: &usize| all.iter().any(|hashes| hashes.get(index) != all[0].get(index));
    (0..count).find(differ).map_or("none".to_owned(), |index| index.to_string())
}

/// All ranks tell `mine`; returns what `merge` makes of that, by rank, on lane 0.
fn round(
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

/// The descriptions side by side: ranks that said the same together, tensors only where they differ.
fn compare(told: &Told) -> String {
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
    fn texts_travel() {
        let told = vec![(3, "barrier".to_owned()), (4, String::new())];
        assert_eq!(decode(&encode(&told)), told);
    }

    #[test]
    fn the_first_difference_is_found() {
        let told = |texts: &[&str]| texts.iter().map(|&text| (0, text.to_owned())).collect::<Vec<_>>();
        assert_eq!(first_difference(&told(&["a b c", "a b d", "a b c"])), "2");
        assert_eq!(first_difference(&told(&["a b", "a b"])), "none");
        assert_eq!(blocks(&(10..21), 4).collect::<Vec<_>>(), [10..13, 13..16, 16..19, 19..21]);
    }
}
