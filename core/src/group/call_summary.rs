//! What is known of all calls of one signature: text for people, and the statistics of small calls.
//!
//! Thread rule: written by the thread that runs the group's calls, read by any.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use crate::collective::Call;

/// How many tensors of a call stand in a dump.
const TENSORS_SHOWN: usize = 4;

/// The words for all calls of one signature.
#[derive(Debug)]
pub(super) struct CallSummary {
    pub name_line: String,
    pub tensors: Vec<String>,
    pub count: usize,
    pub bytes: usize,
}

impl CallSummary {
    pub fn new(call: &Call) -> CallSummary {
        let count = call.tensors(0).len();
        CallSummary {
            name_line: call.name_line(),
            tensors: call.lines(0..TENSORS_SHOWN).collect(),
            count,
            bytes: call.layout.total(),
        }
    }
}

/// What is remembered of the short calls of one kind that ended at once.
#[derive(Debug)]
pub(super) struct SmallCallStats {
    pub signature: u64,
    pub summary: Arc<CallSummary>,
    /// How many there were.
    pub calls: AtomicU64,
    /// What all of them took, in nanoseconds, as far as those that were timed tell.
    pub nanos: AtomicU64,
    /// Of the last one: its number on this rank, and its place among the matched calls.
    pub number: AtomicU64,
    pub match_index: AtomicU64,
    /// When the last one ended, to some milliseconds (nanoseconds after the start of the recorder).
    pub last_ended: AtomicU64,
    /// What the last one that was timed took, in nanoseconds.
    pub last_nanos: AtomicU64,
}

/// One call of so many is timed: a look at the precise clock is a good part of what such a call costs.
pub(super) const SAMPLE_EVERY: u64 = 8;

impl SmallCallStats {
    pub fn new(signature: u64, summary: Arc<CallSummary>) -> SmallCallStats {
        let zero = AtomicU64::default;
        SmallCallStats {
            signature,
            summary,
            calls: zero(),
            nanos: zero(),
            number: zero(),
            match_index: zero(),
            last_ended: zero(),
            last_nanos: zero(),
        }
    }

    /// Counts a call that ended so long after the start of the recorder, and what it took if it was timed.
    pub fn count(&self, number: u64, place: u64, ended: Duration, took: Option<Duration>) {
        let nanos = |time: Duration| u64::try_from(time.as_nanos()).unwrap_or(u64::MAX);
        // One writer at a time: plain additions will do.
        let add = |sum: &AtomicU64, more: u64| sum.store(sum.load(Ordering::Relaxed) + more, Ordering::Relaxed);
        self.number.store(number, Ordering::Relaxed);
        self.match_index.store(place, Ordering::Relaxed);
        self.last_ended.store(nanos(ended), Ordering::Relaxed);
        add(&self.calls, 1);
        if let Some(took) = took {
            self.last_nanos.store(nanos(took), Ordering::Relaxed);
            add(&self.nanos, nanos(took).saturating_mul(SAMPLE_EVERY));
        }
    }
}
