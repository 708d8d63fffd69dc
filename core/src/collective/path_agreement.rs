//! The steps of a call that chooses between two paths ([`super::path_choice`]): it is timed, and the ranks
//! agree on the path of the next one.
//!
//! Thread rule: as for [`Channel`].

use std::time::{Duration, Instant};

use super::call::Call;
use super::channel::Channel;
use super::operation::{Pattern, Root};
use super::path_choice::{CallKind, CallPath, CallTimer};
use crate::transport::rounds::{AllPacked, Open};
use crate::transport::shm_channel::PathNote;

impl Channel {
    /// The kind of a call of which the longest block of all ranks has `total` bytes; `None`: it has no choice.
    #[inline]
    pub(super) fn kind(&self, call: &Call, total: usize) -> Option<CallKind> {
        let volume = total.saturating_mul(call.blocks());
        let reduces = call.op.collective.reduces;
        let min = call.measured_from();
        let has_paths = || match reduces {
            // A longer reduction always goes in slices, and one of blocks in one round.
            true => call.is_small() && call.op.pattern() == Pattern::Line,
            false => self.direct_copies.possible && !call.op.is_barrier() && !call.is_pinned(),
        };
        let kind = || CallKind::new(call.op.collective.code, self.timing_rank(call), volume, min);
        (volume >= min && has_paths()).then(kind)
    }

    /// The path of `call`, which is of this kind.
    pub(super) fn path(&self, call: &Call, kind: CallKind) -> CallPath {
        if self.always_copies_directly(call) { CallPath::Second } else { self.path_choice.path(kind) }
    }

    fn always_copies_directly(&self, call: &Call) -> bool {
        self.direct_copies.always && !call.op.collective.reduces
    }

    /// The local rank that times calls like this one: one that receives data.
    fn timing_rank(&self, call: &Call) -> usize {
        let root = || self.topology.local_rank_of(call.op.root).unwrap_or(0);
        match call.op.collective.root {
            Root::None => 0,
            Root::Target => root(),
            Root::Source => usize::from(root() == 0 && self.topology.local_size() > 1),
        }
    }

    /// Before the first round of a call of which the longest block has `total` bytes: starts its timer, if it has
    /// a choice.
    #[inline]
    pub(super) fn start_timer(&mut self, call: &Call, total: usize, kind: Option<CallKind>) {
        self.timer = kind.filter(|_| !self.always_copies_directly(call)).map(|kind| CallTimer {
            kind,
            path: self.path(call, kind),
            bytes: total.saturating_mul(call.blocks()),
            since: self.path_choice.state(kind).is_timed().then(Instant::now),
            packing: Duration::ZERO,
            has_matched: false,
        });
    }

    /// Before this rank packs: if the call has a choice, writes its note.
    #[inline(always)]
    pub(super) fn post_path_note(&mut self, open: Open) {
        if self.timer.is_some() {
            self.write_path_note(open);
        }
    }

    #[cold]
    fn write_path_note(&mut self, open: Open) {
        if let Some(timer) = &self.timer
            && let Some(since) = timer.since
            && !timer.has_matched
        {
            let decides = timer.kind.timing_rank == self.topology.local_rank();
            let second = decides && self.path_choice.state(timer.kind).next() == CallPath::Second;
            open.post_path_note(&self.rounds, PathNote { second, packing: since.elapsed() });
        }
    }

    /// In the first round of a matched call: if it has a choice, takes the path of the next call from the note of the
    /// rank that times.
    #[inline(always)]
    pub(super) fn agree_on_path(&mut self, all_packed: AllPacked) {
        if self.timer.is_some() {
            self.read_path_notes(all_packed);
        }
    }

    #[cold]
    fn read_path_notes(&mut self, all_packed: AllPacked) {
        if let Some(timer) = &mut self.timer
            && !timer.has_matched
        {
            let mut next = None;
            if timer.since.is_some() {
                let note = all_packed.path_note(&self.rounds);
                timer.packing = timer.packing.max(note.packing);
                next = Some(if note.second { CallPath::Second } else { CallPath::First });
                timer.since = Some(Instant::now());
            }
            self.path_choice.state(timer.kind).agree(next);
            timer.has_matched = true;
        }
    }

    /// Ends the timing of a call, if it has a choice, and counts it.
    #[inline(always)]
    pub(super) fn end_timer(&mut self) {
        if self.timer.is_some() {
            self.count_time();
        }
    }

    #[cold]
    fn count_time(&mut self) {
        if let Some(timer) = self.timer.take()
            && timer.has_matched
            && let Some(since) = timer.since
            && timer.kind.timing_rank == self.topology.local_rank()
        {
            let time = timer.packing + since.elapsed();
            let state = self.path_choice.state(timer.kind);
            state.add(timer.path, time.as_nanos() as f32 / timer.bytes.max(1) as f32);
        }
    }
}
