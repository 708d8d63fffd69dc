//! A call in words, for messages, dumps and mismatch reports.

use std::ops::Range;

use xxhash_rust::xxh3::{Xxh3, xxh3_64_with_seed};

use super::call::Call;
use super::check::tensor_title;
use super::operation::{Op, Root};
use crate::buffer::Tensor;
use crate::reduce::ReduceOp;

impl Call {
    /// The call in a line for messages: `average 'bucket 0' on team 0`, with its schedule position.
    pub fn full_name(&self) -> String {
        self.name_line() + self.schedule_position()
    }

    /// The call in a line, without its schedule position.
    pub fn name_line(&self) -> String {
        let name = self.name();
        let by_name = if self.is_by_name() { " by name" } else { "" };
        let name = if name.is_empty() { String::new() } else { format!(" '{name}'{by_name}") };
        let group = self.group().name().suffix();
        let group = if self.producer().is_some() { group + " on a GPU" } else { group };
        let what = self.op.title();
        let root = match self.op.collective.root {
            Root::None => String::new(),
            Root::Source => format!(" from rank {}", self.op.root),
            Root::Target => format!(" to rank {}", self.op.root),
        };
        let towers = match self.towers() {
            towers if towers > 1 && self.op.collective.reduces => format!(" over {towers} towers"),
            _ => String::new(),
        };
        format!("{what}{name}{root}{group}{towers}")
    }

    /// The title of the call and a line for each existing tensor of `range`, in at most `limit` bytes.
    pub fn describe(&self, range: Range<usize>, limit: usize) -> String {
        let tensors = self.tensors(0);
        let mut text = self.full_name();
        if !tensors.is_empty() {
            text += &format!(" of {} tensor{}", tensors.len(), if tensors.len() == 1 { "" } else { "s" });
        }
        for line in self.lines(range) {
            if text.len() + 1 + line.len() > limit {
                break;
            }
            text += "\n";
            text += &line;
        }
        text.truncate(text.floor_char_boundary(limit));
        text
    }

    /// Hash of the name, and of the operation unless the call matches by name; 0 for a call without a name.
    pub fn key(&self) -> u64 {
        let operation = if self.is_by_name() { 0 } else { self.op.collective.code as u64 };
        if self.name().is_empty() { 0 } else { xxh3_64_with_seed(self.name().as_bytes(), operation).max(1) }
    }

    /// The call in a line with its first tensor, for messages about ranks that lack it.
    pub fn summary(&self) -> String {
        let more = self.tensors(0).len().saturating_sub(1);
        let more = if more == 0 { String::new() } else { format!(" and {more} more") };
        let first = self.lines(0..1).next().map(|first| format!(" ({first}{more})"));
        self.full_name() + &first.unwrap_or_default()
    }

    /// A line for each tensor of `range`.
    pub fn lines(&self, range: Range<usize>) -> impl Iterator<Item = String> {
        let mut names = self.tensor_names().described().skip(range.start);
        let tensors = self.tensors(0).iter().enumerate().take(range.end).skip(range.start);
        tensors.map(move |(index, tensor)| {
            let title = tensor_title(index, &names.next().unwrap_or_default());
            format!("{title}: {}{}", tensor.describe(), self.counts().describe(index))
        })
    }

    /// Hash of what the ranks compare of tensors `range`, to locate a difference; missing tensors count too.
    pub fn range_hash(&self, range: Range<usize>) -> u64 {
        let mut hash = Xxh3::new();
        let mut names = self.tensor_names().compared().unwrap_or_default().lines().skip(range.start);
        for index in range {
            hash.update(self.tensors(0).get(index).map(Tensor::describe).unwrap_or_default().as_bytes());
            hash.update(self.counts().describe(index).as_bytes());
            hash.update(names.next().unwrap_or_default().as_bytes());
            hash.update(b"\n");
        }
        hash.digest()
    }
}

impl Op {
    /// The collective and its operator.
    pub fn title(&self) -> String {
        match (self.collective.reduces, self.reduce) {
            (false, _) => self.collective.name.to_owned(),
            (true, ReduceOp::Mean) if self.is_allreduce() => "average".to_owned(),
            (true, reduce) => format!("{} ({})", self.collective.name, reduce.name()),
        }
    }
}
