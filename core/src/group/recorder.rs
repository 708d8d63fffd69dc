//! The flight recorder: the last calls of a group, always on, and totals of all calls.
//!
//! A record costs a slot in a ring and a few clock reads; texts are created on request.
//! Thread rule: any thread; a lock guards the [`RecorderState`].

use std::collections::VecDeque;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::{Duration, Instant};

use rustix::time::{ClockId, clock_gettime};

use super::call_summary::{CallSummary, SmallCallStats};
use super::callers::Origin;
use super::lost::LostCalls;
use super::record::Record;
use super::totals::Totals;
use crate::collective::Call;
use crate::deadline::Deadline;
use crate::hashed_map::HashedMap;
use crate::lock::lock;

/// Number of calls in the ring.
const RING_CALLS: usize = 256;
/// Maximum number of cached summaries.
const MAX_SUMMARIES: usize = 512;

/// Nanoseconds of a clock that lags some milliseconds and is almost free to read.
fn coarse_now() -> u64 {
    let time = clock_gettime(ClockId::MonotonicCoarse);
    time.tv_sec.cast_unsigned().wrapping_mul(1_000_000_000).wrapping_add(time.tv_nsec.cast_unsigned())
}

/// See the module's documentation.
#[derive(Default)]
pub(super) struct RecorderState {
    ring: VecDeque<Arc<Record>>,
    /// Calls that were evicted from the ring before they ended; some have ended since.
    evicted_running: Vec<Arc<Record>>,
    /// Calls since those that have ended were removed: as many as there are, so that a call costs the same however many
    /// are in flight.
    since_sweep: usize,
    summaries: HashedMap<Arc<CallSummary>>,
    /// Statistics of small calls.
    small_calls: Vec<Arc<SmallCallStats>>,
    /// Totals of calls that have left the ring.
    totals: Totals,
}

impl RecorderState {
    /// Makes room in the ring. Returns the evicted record if its call has ended.
    fn evict(&mut self) -> Option<Arc<Record>> {
        let RecorderState { evicted_running, totals, since_sweep, .. } = self;
        *since_sweep += 1;
        if *since_sweep >= evicted_running.len() {
            *since_sweep = 0;
            evicted_running.retain(|record| {
                totals.add(record);
                record.ended().is_none()
            });
        }
        if self.ring.len() < RING_CALLS {
            return None;
        }
        let oldest = self.ring.pop_front()?;
        if oldest.ended().is_none() {
            self.evicted_running.push(oldest);
            return None;
        }
        self.totals.add(&oldest);
        Some(oldest)
    }
}

/// The submission of a call that has no record yet.
#[derive(Debug, Clone, Copy)]
pub struct Submission {
    /// The number of the call.
    pub(super) number: u64,
    /// By the coarse clock.
    since: u64,
}

impl Submission {
    fn time(self) -> Instant {
        let (now, ago) = (Instant::now(), coarse_now().saturating_sub(self.since));
        now.checked_sub(Duration::from_nanos(ago)).unwrap_or(now)
    }

    /// A record of `call`, which has started, that is neither in the ring nor in the totals.
    pub(super) fn record(self, call: &Call) -> Record {
        let mut record = Record::detached(call);
        (record.number, record.submitted) = (self.number, self.time());
        record.start(true);
        record
    }
}

/// The recorder, with its lock.
pub(super) struct Recorder {
    /// The group's calls that were lost after their end.
    pub lost: Arc<LostCalls>,
    state: Mutex<RecorderState>,
    /// The number of the next call.
    next: AtomicU64,
    /// Time origin of [`SmallCallStats`]: precise clock and coarse clock.
    since: (Instant, u64),
}

impl Default for Recorder {
    fn default() -> Recorder {
        let lost = Arc::default();
        Recorder { lost, state: Mutex::default(), next: AtomicU64::new(0), since: (Instant::now(), coarse_now()) }
    }
}

impl Recorder {
    fn lock(&self) -> MutexGuard<'_, RecorderState> {
        lock(&self.state)
    }

    /// Assigns the number of a call that is submitted now.
    pub fn number(&self) -> u64 {
        self.next.fetch_add(1, Ordering::Relaxed)
    }

    /// The number of the next call.
    pub fn next_number(&self) -> u64 {
        self.next.load(Ordering::Relaxed)
    }

    /// The statistics of small calls like that of `record`.
    pub fn small_call_stats(&self, record: &Record) -> Arc<SmallCallStats> {
        let mut recorder = self.lock();
        if let Some(stats) = recorder.small_calls.iter().find(|stats| stats.signature == record.signature) {
            return Arc::clone(stats);
        }
        let RecorderState { small_calls, totals, .. } = &mut *recorder;
        if small_calls.len() >= MAX_SUMMARIES {
            // Removes the ones that no cached call uses.
            small_calls.retain(|stats| {
                let used = Arc::strong_count(stats) > 1;
                if !used {
                    totals.add_small(stats);
                }
                used
            });
        }
        let stats = Arc::new(SmallCallStats::new(record.signature, Arc::clone(&record.summary)));
        recorder.small_calls.push(Arc::clone(&stats));
        stats
    }

    /// The submission of a call, now.
    pub fn submission(&self) -> Submission {
        Submission { number: self.number(), since: coarse_now() }
    }

    /// Counts a small call that completed without a record; `submitted` is given if it is timed.
    pub fn count_small(&self, number: u64, stats: &SmallCallStats, match_index: u64, submitted: Option<Instant>) {
        let ended = coarse_now().saturating_sub(self.since.1);
        stats.count(number, match_index, ended, submitted.map(|from| from.elapsed()));
    }

    /// Opens the record of a call, which is submitted now without an earlier `submission`.
    pub fn open(&self, call: &Call, submission: Option<Submission>, deadline: Deadline, origin: Origin) -> Arc<Record> {
        let (team, signature) = (call.group().number(), call.signature);
        self.open_summary(team, signature, || CallSummary::new(call), submission, deadline, origin)
    }

    /// Opens the record of an operation that this rank makes without the others. `key` is that of `summary`.
    pub fn open_one_sided(
        &self,
        team: i32,
        key: u64,
        summary: impl FnOnce() -> CallSummary,
        submission: Option<Submission>,
    ) -> Arc<Record> {
        self.open_summary(team, key, summary, submission, Deadline::default(), Origin::default())
    }

    fn open_summary(
        &self,
        team: i32,
        signature: u64,
        summary: impl FnOnce() -> CallSummary,
        submission: Option<Submission>,
        deadline: Deadline,
        origin: Origin,
    ) -> Arc<Record> {
        let mut recorder = self.lock();
        if recorder.summaries.len() > MAX_SUMMARIES {
            recorder.summaries.clear();
        }
        let summary = Arc::clone(recorder.summaries.entry(signature).or_insert_with(|| Arc::new(summary())));
        let number = submission.map_or_else(|| self.number(), |submission| submission.number);
        let mut new_record = Record::new(team, number, summary, signature, deadline, origin);
        submission.iter().for_each(|submission| new_record.submitted = submission.time());
        // Reuses the evicted record if nobody else has it.
        let record = match recorder.evict() {
            Some(mut oldest) => match Arc::get_mut(&mut oldest) {
                Some(slot) => {
                    *slot = new_record;
                    oldest
                }
                None => Arc::new(new_record),
            },
            None => Arc::new(new_record),
        };
        recorder.ring.push_back(Arc::clone(&record));
        record
    }

    /// A queued call whose deadline has passed, which ends the group.
    pub fn overdue(&self) -> Option<Arc<Record>> {
        let waits =
            |record: &&Arc<Record>| record.started().is_none() && record.ended().is_none() && !record.is_unmatched();
        let is_late = |record: &&Arc<Record>| record.deadline.is_over(record.submitted.elapsed());
        let recorder = self.lock();
        recorder.evicted_running.iter().chain(&recorder.ring).filter(waits).find(is_late).cloned()
    }

    /// The calls that have not ended and that other ranks make, too.
    pub fn pending(&self) -> Vec<Arc<Record>> {
        let recorder = self.lock();
        recorder
            .evicted_running
            .iter()
            .chain(&recorder.ring)
            .filter(|record| record.ended().is_none() && !record.summary.one_sided)
            .cloned()
            .collect()
    }

    /// Totals of all ended calls.
    pub fn totals(&self) -> Totals {
        let recorder = self.lock();
        let mut totals = recorder.totals.clone();
        recorder.evicted_running.iter().chain(&recorder.ring).for_each(|record| totals.add(record));
        recorder.small_calls.iter().for_each(|stats| totals.add_small(stats));
        totals
    }

    /// Seconds that callers of small calls have waited.
    pub fn small_call_wait(&self) -> f64 {
        self.lock().small_calls.iter().map(|stats| stats.nanos.load(Ordering::Relaxed) as f64 * 1e-9).sum()
    }

    /// The last calls, oldest first; of small calls that completed inline, the last of each signature.
    pub fn last(&self, team: i32) -> Vec<Arc<Record>> {
        let recorder = self.lock();
        let running = recorder.evicted_running.iter().filter(|record| record.ended().is_none());
        let mut last: Vec<Arc<Record>> = running.chain(&recorder.ring).cloned().collect();
        let used = recorder.small_calls.iter().filter(|stats| stats.calls.load(Ordering::Relaxed) > 0);
        last.extend(used.map(|stats| Arc::new(Record::of_small(team, stats, self.since.0))));
        last.sort_by_key(|record| record.number);
        last
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use crate::buffer::{Buffer, Tensor};
    use crate::collective::{CallConfig, Counts, Op};
    use crate::dtype::DType;
    use crate::error::Error;
    use crate::group_key::GroupKey;
    use crate::timings::{Activity, PhaseTimer};
    use crate::topology::Topology;

    fn call(data: &mut [f32], name: &str) -> Call {
        let config = CallConfig::new(&Topology::new(0, &[0, 0]), GroupKey::team(0), 1, 4096);
        let tensor = Tensor::new(Buffer::in_place(data.as_mut_ptr().cast(), data.len(), DType::F32), &[]);
        Call::new(Op::MEAN, vec![vec![tensor]], Counts::Even, name, "", "weight".into(), config).unwrap()
    }

    #[test]
    fn last_calls_are_kept_and_all_are_counted() {
        let recorder = Recorder::default();
        let mut data = [0f32; 16];
        for number in 0..RING_CALLS as u64 + 10 {
            let record = recorder.open(
                &call(&mut data, "a"),
                None,
                Deadline { after: Some(Duration::ZERO), ..Deadline::default() },
                Origin::default(),
            );
            assert_eq!(record.number, number);
            assert!(recorder.overdue().is_some_and(|is_late| Arc::ptr_eq(&is_late, &record)));
            record.start(number % 2 == 0);
            assert!(recorder.overdue().is_none());
            record.matched(number + 1);
            let result = if number == 3 { Err(Error::Timeout("late".into())) } else { Ok(()) };
            record.end(&result);
        }
        let last = recorder.last(0);
        assert_eq!((last.len(), last[0].number), (RING_CALLS, 10));
        assert_eq!(last[0].summary.tensors, ["tensor 0 'weight': float32[16]"]);
        assert!(last.windows(2).all(|pair| Arc::ptr_eq(&pair[0].summary, &pair[1].summary)), "words are made once");
        let totals = recorder.totals();
        assert_eq!((totals.calls, totals.failed, totals.bytes), (266, 1, 266 * 64));
    }

    #[test]
    fn calls_in_flight_are_kept_until_they_end() {
        let recorder = Recorder::default();
        let mut data = [0f32; 16];
        let open = |data: &mut [f32]| recorder.open(&call(data, "a"), None, Deadline::default(), Origin::default());
        let running: Vec<_> = (0..5 * RING_CALLS).map(|_| open(&mut data)).collect();
        assert_eq!((recorder.pending().len(), recorder.totals().calls), (running.len(), 0));
        running.iter().for_each(|record| record.end(&Ok(())));
        assert_eq!((recorder.pending().len(), recorder.last(0).len()), (0, RING_CALLS));
        for more in 0..5 * RING_CALLS as u64 {
            assert_eq!(recorder.totals().calls, running.len() as u64 + more);
            open(&mut data).end(&Ok(()));
        }
        assert!(recorder.lock().evicted_running.is_empty());
    }

    #[test]
    fn small_call_is_recorded_with_the_time_of_its_end() {
        let recorder = Recorder::default();
        let mut data = [0f32; 16];
        let first = recorder.open(&call(&mut data, "a"), None, Deadline::default(), Origin::default());
        first.end(&Ok(()));
        let stats = recorder.small_call_stats(&first);
        recorder.count_small(recorder.number(), &stats, 2, Some(Instant::now()));
        std::thread::sleep(Duration::from_millis(60));
        recorder.count_small(recorder.number(), &stats, 3, None);
        let last = recorder.last(0);
        let numbers: Vec<_> = last.iter().map(|record| (record.number, record.match_index())).collect();
        assert_eq!(numbers, [(0, None), (2, Some(3))]);
        let ended = |record: &Record| record.submitted + record.ended().unwrap();
        assert!(ended(&last[1]) > ended(&last[0]) + Duration::from_millis(40), "of the one that was not timed too");
    }

    #[test]
    fn number_of_summaries_is_limited() {
        let recorder = Recorder::default();
        for stats in 0..3 * MAX_SUMMARIES {
            recorder.open(&call(&mut [0.0], &stats.to_string()), None, Deadline::default(), Origin::default());
            assert!(recorder.lock().summaries.len() <= MAX_SUMMARIES + 1);
        }
    }

    /// Prints the cost of the recorder and its timings for a call of one chunk; see `docs/diagnosis.md`.
    #[test]
    #[ignore = "a measurement: cargo test --release -p dl_comm_core --lib -- --ignored --nocapture costs"]
    fn record_costs() {
        let recorder = Recorder::default();
        let mut data = [0f32; 16];
        let call = call(&mut data, "a");
        let rounds = 200_000;
        // The processor time of this thread, independent of other load.
        let clock = || clock_gettime(ClockId::ThreadCPUTime);
        let start = clock();
        for _ in 0..rounds {
            let record = recorder.open(&call, None, Deadline::default(), Origin::default());
            record.start(true);
            let mut timer = PhaseTimer::start(&record.timings, 64);
            for activity in [Activity::Copy, Activity::Reduce, Activity::Copy] {
                timer.end(activity);
            }
            record.matched(1);
            record.end(&Ok(()));
        }
        let spent = clock() - start;
        let spent = spent.tv_sec as f64 * 1e9 + spent.tv_nsec as f64;
        println!("{:.0} ns a call", spent / f64::from(rounds));
    }
}
