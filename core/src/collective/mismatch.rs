//! Mismatch reports: all ranks locate the difference between their calls together and build the same message.
//!
//! First, all-gathers ([`super::value_allgather`]) of hashes narrow down which tensors of long lists differ. Then the
//! ranks exchange the descriptions of these tensors.

use std::fmt::Write;
use std::ops::Range;

use super::call::Call;
use super::channel::Channel;
use super::value_allgather::{allgather_merge, max_value_bytes};
use crate::error::{Error, Result};
use crate::transport::WaitContext;

/// Maximum number of differing tensors in a message.
const MAX_SHOWN: usize = 8;
/// Maximum encoded bytes of a hash.
const MAX_HASH_BYTES: usize = 5;
/// Maximum encoded bytes of the length of a list or text.
const MAX_LENGTH_BYTES: usize = 8;

/// A rank's entry in a mismatch report.
pub enum MismatchEntry<'a> {
    /// The rank's call.
    Call(&'a Call),
    /// No such call; a text about the rank.
    None(String),
}

impl MismatchEntry<'_> {
    fn tensors(&self) -> usize {
        match self {
            MismatchEntry::Call(call) => call.tensors(0).len(),
            MismatchEntry::None(_) => 0,
        }
    }

    /// Hashes of the tensors in each block; empty without a call.
    fn hashes(&self, blocks: impl Iterator<Item = Range<usize>>) -> Vec<u32> {
        match self {
            MismatchEntry::Call(call) => blocks.map(|block| (call.range_hash(block) >> 32) as u32).collect(),
            MismatchEntry::None(_) => Vec::new(),
        }
    }

    fn describe(&self, range: Range<usize>, limit: usize) -> String {
        match self {
            MismatchEntry::Call(call) => call.describe(range, limit),
            MismatchEntry::None(text) => text[..text.floor_char_boundary(limit)].to_owned(),
        }
    }
}

impl Channel {
    /// The mismatch as an error, the same on every rank, or the error that prevented the report.
    pub fn explain(&mut self, entry: &MismatchEntry<'_>, wait_ctx: &WaitContext<'_>) -> Error {
        match locate_difference(self, entry, wait_ctx) {
            Ok(text) => Error::Mismatch(text),
            Err(error) => error,
        }
    }
}

fn locate_difference(channel: &mut Channel, entry: &MismatchEntry<'_>, wait_ctx: &WaitContext<'_>) -> Result<String> {
    let limit = max_value_bytes(channel) - MAX_LENGTH_BYTES;
    let lengths = |lengths: Vec<usize>| lengths.into_iter().max().unwrap_or(0);
    let mut range = 0..allgather_merge(channel, &entry.tensors(), wait_ctx, lengths)?;
    while range.len() > MAX_SHOWN {
        let parts = (limit / MAX_HASH_BYTES).clamp(2, 64);
        let hashes = entry.hashes(blocks(&range, parts));
        let first = allgather_merge(channel, &hashes, wait_ctx, first_difference)?;
        range = match first.and_then(|index| blocks(&range, parts).nth(index)) {
            Some(block) => block,
            None => 0..0, // the tensors are the same
        };
    }
    allgather_merge(channel, &entry.describe(range, limit), wait_ctx, |texts| {
        let mut text = compare(&texts);
        text.truncate(text.floor_char_boundary(limit));
        text
    })
}

fn blocks(range: &Range<usize>, parts: usize) -> impl Iterator<Item = Range<usize>> {
    let size = range.len().div_ceil(parts).max(1);
    let end = range.end;
    range.clone().step_by(size).map(move |start| start..(start + size).min(end))
}

/// The first block whose hashes differ between ranks that have a call.
fn first_difference(hashes: Vec<Vec<u32>>) -> Option<usize> {
    let all: Vec<Vec<u32>> = hashes.into_iter().filter(|hashes| !hashes.is_empty()).collect();
    let count = all.iter().map(Vec::len).max().unwrap_or(0);
    (0..count).find(|&index| all.iter().any(|hashes| hashes.get(index) != all[0].get(index)))
}

/// The descriptions next to each other: grouped by equal text, with only the tensors that differ.
fn compare(texts: &[String]) -> String {
    let mut groups: Vec<(Vec<usize>, &str)> = Vec::new();
    for (rank, text) in texts.iter().enumerate() {
        match groups.iter_mut().find(|(_, other)| other == text) {
            Some((ranks, _)) => ranks.push(rank),
            None => groups.push((vec![rank], text)),
        }
    }
    let max_lines = groups.iter().map(|(_, text)| text.lines().count()).max().unwrap_or(0);
    let differ = |line: usize| groups.iter().any(|(_, text)| text.lines().nth(line) != groups[0].1.lines().nth(line));
    let lines: Vec<usize> = (1..max_lines).filter(|&line| differ(line)).take(MAX_SHOWN).collect();
    let mut out = String::new();
    for (ranks, text) in &groups {
        let title = text.lines().next().unwrap_or("");
        // Writing to a String cannot fail.
        let _infallible = writeln!(out, "  {}: {title}", list_of_ranks(ranks));
        // Skips calls without tensors.
        for &line in lines.iter().filter(|_| text.lines().count() > 1) {
            let _infallible = writeln!(out, "    {}", text.lines().nth(line).unwrap_or("(no further tensor)"));
        }
    }
    out.truncate(out.trim_end().len());
    out
}

/// `rank 3`, `ranks 0, 1, 2`, and for many `ranks 0, 1, … 9 (10 ranks)`.
pub fn list_of_ranks(ranks: &[usize]) -> String {
    let text = |ranks: &[usize]| ranks.iter().map(usize::to_string).collect::<Vec<_>>().join(", ");
    match ranks {
        [rank] => format!("rank {rank}"),
        [first @ .., last] if ranks.len() > 16 => {
            format!("ranks {}, … {last} ({} ranks)", text(&first[..8]), ranks.len())
        }
        _ => format!("ranks {}", text(ranks)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_differences_are_shown() {
        let texts = [
            "average 'a' of 2 tensors\ntensor 0: float32[3]\ntensor 1: float32[4]".to_owned(),
            "average 'a' of 2 tensors\ntensor 0: float32[3]\ntensor 1: float32[5]".to_owned(),
            "average 'a' of 2 tensors\ntensor 0: float32[3]\ntensor 1: float32[4]".to_owned(),
        ];
        assert_eq!(
            compare(&texts),
            "  ranks 0, 2: average 'a' of 2 tensors\n    tensor 1: float32[4]\n  \
             rank 1: average 'a' of 2 tensors\n    tensor 1: float32[5]"
        );
    }

    #[test]
    fn first_difference_is_found() {
        assert_eq!(first_difference(vec![vec![1, 2, 3], vec![1, 2, 4], vec![1, 2, 3]]), Some(2));
        assert_eq!(first_difference(vec![vec![1, 2], vec![], vec![1, 2]]), None);
        assert_eq!(blocks(&(10..21), 4).collect::<Vec<_>>(), [10..13, 13..16, 16..19, 19..21]);
    }
}
