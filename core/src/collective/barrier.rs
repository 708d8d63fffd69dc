//! Nothing moves; the step's flags and the exchange's headers are the barrier.

use std::ops::Range;

use super::{Between, Collective, Job, Lane, Part};
use crate::topology::Topology;

pub(super) struct Barrier;

impl Collective for Barrier {
    unsafe fn pack(&self, _job: &Job, _topology: &Topology, _chunk: usize, _part: Range<usize>, _slot: *mut u8) {}

    fn stays(&self, _job: &Job) -> bool {
        false
    }

    unsafe fn take(&self, _job: &Job, _lane: &Lane<'_>) {}

    unsafe fn combine(&self, _job: &Job, _lane: &Lane<'_>, _slice: Range<usize>) {}
}

impl Between for Barrier {
    fn carried(&self, _job: &Job, _chunk: usize, _piece: Range<usize>) -> usize {
        0
    }

    unsafe fn contribute(&self, _job: &Job, _lane: &Lane<'_>, _piece: Range<usize>, _out: &mut [u8]) -> bool {
        false
    }

    unsafe fn merge(&self, _job: &Job, _lane: &Lane<'_>, _piece: Range<usize>, _low: Part, _high: Part, _out: *mut u8) {
    }

    unsafe fn complete(&self, _job: &Job, _lane: &Lane<'_>, _piece: Range<usize>, _low: Part, _high: Part) {}
}
