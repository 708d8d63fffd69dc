//! Totals of the ended calls of a group. Plain data.

use std::sync::atomic::Ordering;

use super::call_summary::SmallCallStats;
use super::record::Record;
use crate::timings::Activity;

/// Totals of the ended calls of a group.
#[derive(Debug, Default, Clone, PartialEq)]
pub struct Totals {
    /// Ended calls.
    pub calls: u64,
    /// Failed calls.
    pub failed: u64,
    /// Bytes of tensors on the wire.
    pub bytes: u64,
    /// Seconds between submission and start.
    pub queued: f64,
    /// Seconds from start to end.
    pub comm: f64,
    /// Seconds of the threads by [`Activity`]: copy, wait, reduce, network.
    pub activities: [f64; 4],
    /// Rounds, raised flags, messages, bytes of messages.
    pub counts: [u64; 4],
}

impl Totals {
    /// Adds a call, if it has ended.
    pub(super) fn add(&mut self, record: &Record) {
        let Some(ended) = record.ended() else { return };
        self.calls += 1;
        self.failed += u64::from(record.error().is_some());
        self.bytes += record.summary.bytes as u64;
        let started = record.started().unwrap_or(ended);
        self.queued += started.as_secs_f64();
        self.comm += (ended - started).as_secs_f64();
        for activity in [Activity::Copy, Activity::Wait, Activity::Reduce, Activity::Network] {
            self.activities[activity as usize] += record.timings.seconds(activity);
        }
        for (sum, count) in self.counts.iter_mut().zip(record.timings.counts()) {
            *sum += count;
        }
    }

    /// Adds the small calls of a signature: one round and one flag each, without waiting.
    pub(super) fn add_small(&mut self, stats: &SmallCallStats) {
        let calls = stats.calls.load(Ordering::Relaxed);
        self.calls += calls;
        self.bytes += calls * stats.summary.bytes as u64;
        self.comm += stats.nanos.load(Ordering::Relaxed) as f64 * 1e-9;
        self.counts[0] += calls;
        self.counts[1] += calls;
    }
}
