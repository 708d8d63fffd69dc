//! The steps of a call that chooses between slots and direct copies ([`super::path_choice`]): it is timed, and the ranks
//! agree on the path of the next one.
//!
//! Thread rule: as for [`Channel`].

use std::time::{Duration, Instant};

use super::call::Call;
use super::channel::Channel;
use super::operation::Root;
use super::path_choice::{CallPath, CallTimer, Kind};
use crate::transport::shm_region::PathNote;

impl Channel {
    /// The kind of a call of which the longest block of all ranks has `total` bytes; `None`: it has no choice.
    #[inline]
    pub(super) fn kind(&self, call: &Call, total: usize) -> Option<Kind> {
        let volume = total.saturating_mul(call.blocks());
        let moves = !call.op.collective.reduces && !call.op.is_barrier();
        let chooses = volume >= self.direct_copies.min && moves && !call.is_pinned();
        chooses.then(|| Kind::new(call.op.collective.code, volume, self.direct_copies.min))
    }

    /// The path of a call of this kind.
    pub(super) fn path(&self, kind: Kind) -> CallPath {
        if self.direct_copies.always { CallPath::Second } else { self.path_choice.path(kind) }
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

    /// Before the first round of a call of which the longest block has `total` bytes: starts its timer, if it has a choice.
    #[inline]
    pub(super) fn start_timer(&mut self, call: &Call, total: usize, kind: Option<Kind>) {
        self.timer = kind.filter(|_| !self.direct_copies.always).map(|kind| CallTimer {
            kind,
            timing_rank: self.timing_rank(call),
            path: self.path(kind),
            bytes: total.saturating_mul(call.blocks()),
            since: Instant::now(),
            packing: Duration::ZERO,
            has_matched: false,
        });
    }

    /// Before this rank posts round `seq` of a call: if the call has a choice, writes its note.
    #[inline(always)]
    pub(super) fn post_path_note(&mut self, seq: u32) {
        if self.timer.is_some() {
            self.write_path_note(seq);
        }
    }

    #[cold]
    fn write_path_note(&mut self, seq: u32) {
        if let Some(timer) = &self.timer
            && !timer.has_matched
        {
            // Only that of the rank that times the call counts.
            let second = self.path_choice.state(timer.kind).next() == CallPath::Second;
            self.shm.post_path_note(seq, PathNote { second, packing: timer.since.elapsed() });
        }
    }

    /// After all ranks have posted round `seq`, the first one of a matched call: if it has a choice, takes the path of the
    /// next call from the note of the rank that times.
    #[inline(always)]
    pub(super) fn agree_on_path(&mut self, seq: u32) {
        if self.timer.is_some() {
            self.read_path_notes(seq);
        }
    }

    #[cold]
    fn read_path_notes(&mut self, seq: u32) {
        if let Some(timer) = &mut self.timer
            && !timer.has_matched
        {
            for (rank, note) in self.shm.path_notes(seq).enumerate() {
                timer.packing = timer.packing.max(note.packing);
                if rank == timer.timing_rank {
                    let path = if note.second { CallPath::Second } else { CallPath::First };
                    self.path_choice.state(timer.kind).path = path;
                }
            }
            (timer.has_matched, timer.since) = (true, Instant::now());
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
            && timer.timing_rank == self.topology.local_rank()
        {
            let time = timer.packing + timer.since.elapsed();
            let state = self.path_choice.state(timer.kind);
            state.add(timer.path, time.as_nanos() as f32 / timer.bytes.max(1) as f32);
        }
    }
}
