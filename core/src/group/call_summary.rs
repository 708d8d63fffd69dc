//! Data shared by all calls of one signature: texts for messages, and the statistics of small calls.
//!
//! Thread rule: the thread that runs the group's calls writes; any thread reads.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use crate::collective::Call;

/// Maximum number of tensors of a call in a dump.
const TENSORS_SHOWN: usize = 4;

/// Texts for all calls of one signature.
#[derive(Debug)]
pub(super) struct CallSummary {
    pub name_line: String,
    pub tensors: Vec<String>,
    pub count: usize,
    pub bytes: usize,
    /// Whether a rank makes it without the others.
    pub one_sided: bool,
}

impl CallSummary {
    /// Of an operation that a rank makes without the others.
    pub fn one_sided(name_line: String, bytes: usize) -> CallSummary {
        CallSummary { name_line, tensors: Vec::new(), count: 0, bytes, one_sided: true }
    }

    pub fn new(call: &Call) -> CallSummary {
        let count = call.tensors(0).len();
        CallSummary {
            name_line: call.name_line(),
            tensors: call.lines(0..TENSORS_SHOWN).collect(),
            count,
            bytes: call.layout.total(),
            one_sided: false,
        }
    }
}

/// Statistics of the small calls of one signature that completed inline.
#[derive(Debug)]
pub(super) struct SmallCallStats {
    pub signature: u64,
    pub summary: Arc<CallSummary>,
    /// The number of calls.
    pub calls: AtomicU64,
    /// Estimated total nanoseconds, from the timed calls.
    pub nanos: AtomicU64,
    /// The last call: its number on this rank, and its index among the matched calls.
    pub number: AtomicU64,
    pub match_index: AtomicU64,
    /// End of the last call, in nanoseconds since the start of the recorder, to some milliseconds.
    pub last_ended: AtomicU64,
    /// Nanoseconds of the last timed call.
    pub last_nanos: AtomicU64,
}

/// One in this many calls is timed: the precise clock is expensive compared with a small call.
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

    /// Counts a call that ended `ended` nanoseconds after the start of the recorder and took `duration`, if it was timed.
    pub fn count(&self, number: u64, match_index: u64, ended: u64, duration: Option<Duration>) {
        let nanos = |time: Duration| u64::try_from(time.as_nanos()).unwrap_or(u64::MAX);
        // A single writer: no atomic addition is necessary.
        let add = |sum: &AtomicU64, more: u64| sum.store(sum.load(Ordering::Relaxed) + more, Ordering::Relaxed);
        self.number.store(number, Ordering::Relaxed);
        self.match_index.store(match_index, Ordering::Relaxed);
        self.last_ended.store(ended, Ordering::Relaxed);
        add(&self.calls, 1);
        if let Some(duration) = duration {
            self.last_nanos.store(nanos(duration), Ordering::Relaxed);
            add(&self.nanos, nanos(duration).saturating_mul(SAMPLE_EVERY));
        }
    }
}
