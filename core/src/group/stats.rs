//! JSON statistics of a group for `stats()`, and its last calls for a dump.

use std::sync::Arc;
use std::time::{Instant, SystemTime, UNIX_EPOCH};

use serde_json::{Value, json};

use super::record::Record;
use super::submit::Group;
use crate::timings::{Activity, WaitTarget};

impl Group {
    /// The statistics, which the docstring of `dl_comm.stats` describes.
    pub fn stats(&self) -> Value {
        let totals = self.shared.recorder.totals();
        let [copied, waited, reduced, network] = totals.activities;
        let [rounds, flags, messages, sent] = totals.counts;
        json!({
            "calls": totals.calls, "failed": totals.failed, "bytes": totals.bytes,
            "queued_s": totals.queued, "comm_s": totals.comm,
            "copied_s": copied, "waited_s": waited, "reduced_s": reduced, "network_s": network,
            "shm_rounds": rounds, "shm_flags": flags, "messages": messages, "sent_bytes": sent,
        })
    }

    /// The same, with the name and the members.
    pub fn described_stats(&self) -> Value {
        let mut stats = self.stats();
        stats["name"] = self.shared.config.key.name().json();
        stats["members"] = self.shared.members.iter().collect();
        stats
    }

    /// The last calls, oldest first, with the ranks that the group waits for.
    pub fn dump(&self) -> Value {
        let mut records = self.shared.recorder.last(self.shared.config.key.number());
        records.extend(self.lead.held_record().map(Arc::new));
        let (members, topology) = (&self.shared.members, &self.topology);
        let ranks = |target| {
            let group_ranks = match target {
                WaitTarget::Rank(rank) => vec![rank],
                WaitTarget::Host(host) => topology.ranks_of(host).to_vec(),
            };
            group_ranks.into_iter().map(|rank| members.to_world(rank)).collect()
        };
        let calls: Vec<Value> = records.iter().map(|record| call(record, &ranks)).collect();
        let failure = self.shared.known_failure().map(|error| error.to_string());
        json!({
            "team": self.shared.config.key.name().json(), "group": format!("{:016x}", self.shared.config.key.hash()),
            "members": members.iter().collect::<Vec<_>>(), "threads": self.shared.config.channels,
            "matched": self.shared.matched(), "failure": failure, "calls": calls,
        })
    }
}

/// Unix time of `moment` in seconds, by the current system clock.
fn unix_seconds(moment: Instant) -> f64 {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs_f64();
    now - moment.elapsed().as_secs_f64()
}

/// A call in a dump. `ranks`: those of the job behind a rank or host of the group.
fn call(record: &Arc<Record>, ranks: &dyn Fn(WaitTarget) -> Vec<usize>) -> Value {
    let timings = &record.timings;
    let state = match (record.ended(), record.error(), record.started(), record.match_index()) {
        (Some(_), None, ..) => "done",
        (Some(_), Some(_), ..) => "failed",
        (None, _, None, _) => "queued",
        (None, _, Some(_), None) if !record.summary.one_sided => "matching",
        (None, _, Some(_), _) => "running",
    };
    let waits: Vec<Value> = timings
        .waits()
        .into_iter()
        .map(|(target, time)| json!({"ranks": ranks(target), "seconds": time.as_secs_f64()}))
        .collect();
    let waiting: Vec<usize> = match record.ended() {
        Some(_) => Vec::new(),
        None => timings.waiting().into_iter().flat_map(ranks).collect(),
    };
    let [rounds, flags, messages, sent] = timings.counts();
    json!({
        "number": record.number, "match_index": record.match_index(), "name": record.summary.name_line,
        "signature": format!("{:016x}", record.signature), "state": state,
        "error": record.error().map(ToString::to_string),
        "tensors": record.summary.tensors, "num_tensors": record.summary.count, "bytes": record.summary.bytes,
        "submitted": unix_seconds(record.submitted),
        "started_s": record.started().map(|time| time.as_secs_f64()),
        "ended_s": record.ended().map(|time| time.as_secs_f64()),
        "copied_s": timings.seconds(Activity::Copy), "waited_s": timings.seconds(Activity::Wait),
        "reduced_s": timings.seconds(Activity::Reduce), "network_s": timings.seconds(Activity::Network),
        "waits": waits, "waiting_for": waiting,
        "one_sided": record.summary.one_sided,
        "shm_rounds": rounds, "shm_flags": flags, "messages": messages, "sent_bytes": sent,
    })
}
