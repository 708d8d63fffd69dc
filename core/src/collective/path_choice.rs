//! The choice between two paths of a call on one host.
//!
//! Neither is always faster. A call that only moves data goes through slots or copies directly: slots copy twice, and
//! their lines move between the caches of two processors, which takes one to four times as long, depending on where the
//! threads run; for direct copies the system looks up each page of private memory. A short reduction goes in one round,
//! in which every rank reads the inputs of all, or in slices: one round takes 0.4 to 0.8 of the time where processors
//! share a cache, and up to 3.5 times as long where they do not. So one rank times its calls, and its header says which
//! path the next call of the same kind takes. All ranks read the same headers, so they agree.
//! [`super::path_agreement`] has the steps of a call.
//! Thread rule: plain data of a channel.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

/// How a call runs on one host.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum CallPath {
    /// Moves: into a slot and out of it. Reductions: in one round.
    #[default]
    First,
    /// Moves: from tensor to tensor, where the ranks can access them. Reductions: in slices.
    Second,
}

impl CallPath {
    fn other(self) -> CallPath {
        match self {
            CallPath::First => CallPath::Second,
            CallPath::Second => CallPath::First,
        }
    }
}

/// Calls of one collective and of similar size, which one rank times.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct CallKind {
    collective: i32,
    /// The local rank that times the calls.
    pub timing_rank: usize,
    /// The size's level above the least.
    size: usize,
}

/// Levels of sizes: four while the bytes double.
const SIZES: usize = 64;

impl CallKind {
    /// The kind of a call of `volume` bytes, which local rank `timing_rank` times; `min`: the least of a call that has a
    /// choice.
    pub(super) fn new(collective: i32, timing_rank: usize, volume: usize, min: usize) -> CallKind {
        let size = size_level(volume).saturating_sub(size_level(min)).min(SIZES - 1);
        CallKind { collective, timing_rank, size }
    }
}

/// Four times the binary logarithm of `bytes`, about.
fn size_level(bytes: usize) -> usize {
    let bytes = bytes.max(1);
    let log = bytes.ilog2() as usize;
    // The two bits after the first one.
    let quarter = if log >= 2 { bytes >> (log - 2) } else { bytes << (2 - log) };
    4 * log + quarter % 4
}

/// At first the paths take turns until each has been timed this often: first calls touch new memory.
const FIRST_CALLS: u8 = 4;
/// Once the path has stayed the same for this many calls, one in eight of them is timed.
const STEADY_CALLS: u32 = 16;
/// While one path is `r` times as fast as the other, the slower one is tried again after `r` times as many timed calls.
const PROBE_EVERY: f32 = 32.0;
/// Calls of a trial: the first one finds other memory in the caches.
const PROBE_CALLS: u8 = 2;
/// A path must be faster than this part of the time of the favorite to replace it.
const FASTER: f32 = 0.95;

/// What a rank knows of a kind.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct KindState {
    /// The path of the next call, on which the ranks have agreed.
    pub path: CallPath,
    /// The calls since it changed, the same on all ranks.
    steady: u32,
    favorite: CallPath,
    /// Time for each byte on this rank, by path.
    times: [f32; 2],
    /// The first timed calls, by path.
    first_calls: [u8; 2],
    /// Timed calls since the slower path was last tried.
    since_probe: f32,
    /// Calls of this trial.
    probes: u8,
}

impl KindState {
    /// Whether the next call is timed; the same on all ranks.
    pub fn is_timed(&self) -> bool {
        // Pseudo-random, so that calls of different sizes that take turns are all timed.
        self.steady < STEADY_CALLS || self.steady.wrapping_mul(0x9e37_79b9) >> 29 == 0
    }

    /// The ranks have matched a call, and agreed on the path of the next one; `None`: the call was not timed.
    pub fn agree(&mut self, path: Option<CallPath>) {
        let path = path.unwrap_or(self.path);
        self.steady = if path == self.path { self.steady.checked_add(1).unwrap_or(STEADY_CALLS) } else { 0 };
        self.path = path;
    }

    fn time(&self, path: CallPath) -> f32 {
        self.times[path as usize]
    }

    /// Adds the time of a call, for each byte. A shorter time counts at once, because only delays make a call longer than
    /// usual.
    pub fn add(&mut self, path: CallPath, time: f32) {
        let (known, count) = (self.time(path), &mut self.first_calls[path as usize]);
        let shorter = *count == 0 || time < known;
        *count = (*count + 1).min(FIRST_CALLS);
        self.times[path as usize] = if shorter { time } else { known + (time.min(2.0 * known) - known) / 4.0 };
        if path == self.favorite {
            self.since_probe += 1.0;
        } else {
            self.probes += 1;
        }
        let challenger = self.favorite.other();
        if self.knows_both() && self.time(challenger) < FASTER * self.time(self.favorite) {
            self.favorite = challenger;
            self.probes = PROBE_CALLS;
        }
        if self.probes >= PROBE_CALLS {
            (self.since_probe, self.probes) = (0.0, 0);
        }
    }

    /// Whether both paths have been timed often enough.
    fn knows_both(&self) -> bool {
        self.first_calls == [FIRST_CALLS; 2]
    }

    /// The path of the call after one that takes the agreed path.
    pub fn next(&self) -> CallPath {
        match self.first_calls {
            [FIRST_CALLS, FIRST_CALLS] => {}
            [FIRST_CALLS, _] => return CallPath::Second,
            [_, FIRST_CALLS] => return CallPath::First,
            // The Thue-Morse sequence is fair to calls of different sizes that take turns.
            [first, second] => {
                let is_second = (first + second + 1).count_ones() % 2 == 1;
                return if is_second { CallPath::Second } else { CallPath::First };
            }
        }
        let challenger = self.favorite.other();
        let ratio = self.time(challenger) / self.time(self.favorite);
        let probes = self.since_probe >= PROBE_EVERY * ratio.clamp(1.0, 8.0);
        if probes { challenger } else { self.favorite }
    }
}

/// The state of all kinds.
#[derive(Debug, Default)]
pub(super) struct PathChoice {
    kinds: BTreeMap<CallKind, KindState>,
}

impl PathChoice {
    /// The path of the next call of a kind.
    pub fn path(&self, kind: CallKind) -> CallPath {
        self.kinds.get(&kind).map_or_else(CallPath::default, |state| state.path)
    }

    /// The state of a kind.
    pub fn state(&mut self, kind: CallKind) -> &mut KindState {
        self.kinds.entry(kind).or_default()
    }
}

/// A call that has a choice, with its time without the wait for the other ranks.
#[derive(Debug, Clone, Copy)]
pub(super) struct CallTimer {
    pub kind: CallKind,
    pub path: CallPath,
    /// Of all blocks of a rank.
    pub bytes: usize,
    /// When it started; once the calls have matched, when they did. `None`: it is not timed.
    pub since: Option<Instant>,
    /// How long the ranks have packed, in parallel.
    pub packing: Duration,
    pub has_matched: bool,
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;

    use super::*;

    /// Runs `calls` calls that take `time(path)`; returns how many took the second path.
    fn run(state: &mut KindState, calls: usize, time: impl Fn(CallPath) -> f32) -> usize {
        (0..calls)
            .filter(|_| {
                let path = state.path;
                let next = state.is_timed().then(|| state.next());
                if next.is_some() {
                    state.add(path, time(path));
                }
                state.agree(next);
                path == CallPath::Second
            })
            .count()
    }

    fn times(first: f32, second: f32) -> impl Fn(CallPath) -> f32 {
        move |path| if path == CallPath::First { first } else { second }
    }

    #[test]
    fn the_faster_path_wins_and_the_other_is_tried_seldom() {
        let mut state = KindState::default();
        assert!(run(&mut state, 1000, times(1.0, 1.5)) <= 16);
        let mut state = KindState::default();
        assert!(run(&mut state, 1000, times(3.0, 1.0)) >= 980);
    }

    #[test]
    fn a_change_of_speed_changes_the_path() {
        let mut state = KindState::default();
        run(&mut state, 100, times(1.0, 1.3));
        assert!(run(&mut state, 100, times(3.0, 1.3)) >= 75, "the first became slow");
        run(&mut state, 800, times(1.0, 1.3));
        assert!(run(&mut state, 100, times(1.0, 1.3)) <= 5, "and fast again");
    }

    #[test]
    fn steady_calls_are_seldom_timed() {
        let mut state = KindState::default();
        let timed = Cell::new(0);
        run(&mut state, 1000, |path| {
            timed.set(timed.get() + 1);
            times(1.0, 1.5)(path)
        });
        assert!((100..250).contains(&timed.get()), "{timed:?}");
    }

    #[test]
    fn sizes_that_take_turns_do_not_hide_the_faster_path() {
        for period in 2..=9 {
            let mut state = KindState::default();
            let mut number = 0;
            let seconds = (0..4000)
                .map(|_| {
                    number += 1;
                    let for_each_byte = if number % period == 0 { 1.2 } else { 1.0 };
                    run(&mut state, 1, |path| for_each_byte * times(1.0, 1.4)(path))
                })
                .sum::<usize>();
            assert!(seconds < 200, "{seconds} of 4000 calls with period {period}");
        }
    }

    #[test]
    fn slow_first_calls_do_not_count() {
        let mut state = KindState::default();
        let calls = Cell::new(0);
        run(&mut state, 8, |path| {
            calls.set(calls.get() + 1);
            if calls.get() <= 4 { 10.0 } else { times(1.5, 1.0)(path) }
        });
        assert!(run(&mut state, 50, times(1.5, 1.0)) >= 49);
    }

    #[test]
    fn one_delayed_call_changes_nothing() {
        let mut state = KindState::default();
        run(&mut state, 10, times(1.0, 1.5));
        state.add(CallPath::First, 100.0);
        assert_eq!(state.next(), CallPath::First);
    }

    #[test]
    fn kinds_are_collectives_and_sizes() {
        let kind = |volume| CallKind::new(3, 0, volume, 1024);
        assert_eq!(kind(1024), kind(1279));
        assert_ne!(kind(1279), kind(1280));
        assert_ne!(kind(2047), kind(2048));
        assert_ne!(kind(1024), CallKind::new(4, 0, 1024, 1024));
        assert_ne!(kind(1024), CallKind::new(3, 1, 1024, 1024), "each rank knows its own times");
        assert_eq!(kind(usize::MAX), kind(usize::MAX / 2), "the last size has no end");
        assert!(kind(usize::MAX) != CallKind::new(4, 0, 0, 1024));
    }
}
