//! The schedule of `config_team`: which calls of a team block, and which return before their allreduce completes.
//!
//! A schedule gives each call of a team a *carry*: the share of the call's mean that the next call returns. With
//! carries a(i), means m(i) and a(-1) = 0, call i returns
//!
//! ```text
//! (1 - a(i)) m(i) + a(i-1) m(i-1)
//! ```
//!
//! so every mean is returned with a total weight of exactly one. A carry of 0 is a blocking call. Between two carries
//! of 1, a call starts its own allreduce and returns the previous mean (staleness 1); the caller waits only for an
//! allreduce that started a whole step earlier.
//!
//! The phases are those of the Cray PE DL Plugin: a blocking warm-up of `ksteps` calls, or a blocking cool-down for a
//! negative `ksteps`. With `trans_alg` 0 the phase changes at once. The first non-blocking call blocks on its own mean,
//! because no earlier mean exists. The second returns zeros, because its own mean is in flight and the previous mean
//! was already returned. The first blocking call afterwards returns the sum of its own and the previous mean. With
//! `trans_alg` 1 the carry rises and falls linearly over a window of calls. Then the total weight of a call deviates
//! from one by at most 1/window. The plugin's smoothing rule is unknown; this rule is ours.
//!
//! The last of `max_steps` calls blocks and returns everything; so do all later calls.
//!
//! Pure; thread rule: plain data.

use crate::error::{Error, Result};

/// The start of the blocking cool-down of a negative `ksteps`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Cooldown {
    /// After the first `|ksteps|` calls, as in the plugin's porting guide.
    After,
    /// The last `|ksteps|` calls block, as measured with the plugin of 2018.
    Last,
}

impl Cooldown {
    /// From `dl_comm_cooldown` in `dl_comm.h`; 0 is `default`.
    ///
    /// # Errors
    /// [`Error::Invalid`]
    pub fn from_code(code: i32, default: Cooldown) -> Result<Cooldown> {
        match code {
            0 => Ok(default),
            1 => Ok(Cooldown::After),
            2 => Ok(Cooldown::Last),
            _ => Err(Error::Invalid(format!("cooldown is {code}; it is 0 (default), 1 (after) or 2 (last)"))),
        }
    }
}

/// The arguments of `config_team`, with the plugin's names.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Arguments {
    /// 0: abrupt, 1: smooth.
    pub trans_alg: i32,
    /// Length of the blocking warm-up; a negative value is interpreted by [`Cooldown`].
    pub ksteps: i32,
    /// Total number of calls of the team.
    pub max_steps: i32,
    /// 0: silent, 1: rank 0 prints, 2: every rank prints.
    pub verbosity: i32,
    /// Interval of calls between prints of the waited time; 0 prints at the end only.
    pub perf_freq: i32,
    /// Meaning of a negative `ksteps`.
    pub cooldown: Cooldown,
}

/// The ranks that print their waited time.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Verbosity {
    /// No rank.
    Silent,
    /// Rank 0.
    Root,
    /// Every rank.
    All,
}

impl Verbosity {
    /// Whether `rank` prints.
    pub fn prints_on(self, rank: usize) -> bool {
        self == Verbosity::All || (self == Verbosity::Root && rank == 0)
    }
}

/// The schedule of a team; see the module text.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Schedule {
    /// The first call of the non-blocking phase.
    start: u64,
    /// The first call after the non-blocking phase.
    end: u64,
    /// Number of calls over which the carry rises or falls.
    window: u64,
    max_steps: u64,
    /// The ranks that print.
    pub verbosity: Verbosity,
    /// Interval of calls between prints; 0 prints at the end only.
    pub perf_freq: u64,
}

/// A smooth transition takes `max_steps` divided by this.
const SMOOTH_PART: u64 = 20;

impl Schedule {
    /// A schedule in which every call blocks, and no rank prints.
    pub const BLOCKING: Schedule =
        Schedule { start: 0, end: 0, window: 1, max_steps: 0, verbosity: Verbosity::Silent, perf_freq: 0 };

    /// The schedule of `config_team`.
    ///
    /// # Errors
    /// [`Error::Invalid`] with the argument's name.
    pub fn new(arguments: Arguments) -> Result<Schedule> {
        let Arguments { trans_alg, ksteps, max_steps, verbosity, perf_freq, cooldown } = arguments;
        let whole = |name: &str, value: i32| {
            u64::try_from(value).map_err(|_| Error::Invalid(format!("{name} is {value}; it is a whole number from 0")))
        };
        let (max_steps, perf_freq) = (whole("max_steps", max_steps)?, whole("perf_freq", perf_freq)?);
        let window = match trans_alg {
            0 => 1,
            1 => max_steps.div_ceil(SMOOTH_PART).max(2),
            _ => return Err(Error::Invalid(format!("trans_alg is {trans_alg}; it is 0 (abrupt) or 1 (smooth)"))),
        };
        let verbosity = match verbosity {
            0 => Verbosity::Silent,
            1 => Verbosity::Root,
            2 => Verbosity::All,
            _ => return Err(Error::Invalid(format!("verbosity is {verbosity}; it is 0, 1 or 2"))),
        };
        let steps = u64::from(ksteps.unsigned_abs());
        let (start, end) = match (ksteps >= 0, cooldown) {
            (true, _) => (steps, max_steps),
            (false, Cooldown::After) => (0, steps.min(max_steps)),
            (false, Cooldown::Last) => (0, max_steps.saturating_sub(steps)),
        };
        Ok(Schedule { start, end, window, max_steps, verbosity, perf_freq })
    }

    /// The carry of call `index` (from 0). The team's calls alternate between `lists` lists of tensors, and each list's
    /// mean must be returned before the last call.
    pub fn carry_weight(&self, index: u64, lists: u64) -> f64 {
        let end = self.end.min(self.max_steps.saturating_sub(lists));
        if index < self.start || index >= end {
            return 0.0;
        }
        let steps = (index - self.start).min(end - index).min(self.window);
        steps as f64 / self.window as f64
    }

    /// Whether call `index` is in the non-blocking phase.
    pub fn is_non_blocking(&self, index: u64) -> bool {
        (self.start..self.end).contains(&index)
    }

    /// Whether any call from `index` on may have a carry.
    pub fn may_carry_from(&self, index: u64) -> bool {
        self.start < self.end && index < self.end
    }

    /// Whether the waited time is printed after call `index`.
    pub fn prints_at(&self, index: u64) -> bool {
        self.perf_freq > 0 && index.is_multiple_of(self.perf_freq)
    }

    /// The position and phase of call `index`, for messages; empty if every call blocks.
    pub fn position(&self, index: u64, carry: f64) -> String {
        if self.start >= self.end {
            return String::new();
        }
        let phase = match carry {
            0.0 => "blocking".to_owned(),
            1.0 => "non-blocking".to_owned(),
            _ => format!("in transition, {carry:.3} carried over"),
        };
        format!(" (call {index} of {}, {phase})", self.max_steps)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn schedule(trans_alg: i32, ksteps: i32, max_steps: i32, cooldown: Cooldown) -> Schedule {
        Schedule::new(Arguments { trans_alg, ksteps, max_steps, verbosity: 0, perf_freq: 10, cooldown }).unwrap()
    }

    fn carries(schedule: Schedule, calls: u64) -> Vec<f64> {
        (0..calls).map(|index| schedule.carry_weight(index, 1)).collect()
    }

    #[test]
    fn a_warm_up_blocks_and_then_calls_return_early_until_the_last() {
        let schedule = schedule(0, 3, 8, Cooldown::After);
        assert_eq!(carries(schedule, 10), [0., 0., 0., 0., 1., 1., 1., 0., 0., 0.]);
    }

    #[test]
    fn ksteps_of_max_steps_or_more_always_block() {
        for ksteps in [8, 9, 100] {
            assert_eq!(carries(schedule(0, ksteps, 8, Cooldown::After), 10), [0.; 10]);
        }
        assert_eq!(carries(schedule(0, -8, 8, Cooldown::Last), 10), [0.; 10]);
        assert_eq!(carries(Schedule::BLOCKING, 10), [0.; 10]);
        assert!(!Schedule::BLOCKING.may_carry_from(0));
    }

    #[test]
    fn a_cool_down_starts_after_or_covers_the_last_calls() {
        assert_eq!(carries(schedule(0, -6, 8, Cooldown::After), 8), [0., 1., 1., 1., 1., 1., 0., 0.]);
        assert_eq!(carries(schedule(0, -6, 8, Cooldown::Last), 8), [0., 1., 0., 0., 0., 0., 0., 0.]);
        // Non-blocking throughout: the last call still returns everything.
        assert_eq!(carries(schedule(0, -8, 8, Cooldown::After), 8), [0., 1., 1., 1., 1., 1., 1., 0.]);
    }

    #[test]
    fn a_smooth_transition_takes_a_twentieth_of_the_calls() {
        let schedule = schedule(1, 10, 80, Cooldown::After);
        let carries = carries(schedule, 80);
        assert_eq!(carries[9..16], [0., 0., 0.25, 0.5, 0.75, 1., 1.]);
        assert_eq!(carries[74..], [1., 1., 0.75, 0.5, 0.25, 0.]);
    }

    #[test]
    fn the_means_of_several_lists_are_all_returned() {
        let schedule = schedule(0, 2, 10, Cooldown::After);
        let carries: Vec<f64> = (0..10).map(|index| schedule.carry_weight(index, 3)).collect();
        assert_eq!(carries, [0., 0., 0., 1., 1., 1., 1., 0., 0., 0.]);
    }

    #[test]
    fn invalid_arguments_are_named() {
        let valid =
            Arguments { trans_alg: 0, ksteps: 1, max_steps: 2, verbosity: 1, perf_freq: 1, cooldown: Cooldown::After };
        for (name, invalid) in [
            ("trans_alg", Arguments { trans_alg: 2, ..valid }),
            ("max_steps", Arguments { max_steps: -1, ..valid }),
            ("verbosity", Arguments { verbosity: 3, ..valid }),
            ("perf_freq", Arguments { perf_freq: -1, ..valid }),
        ] {
            let error = Schedule::new(invalid).unwrap_err().to_string();
            assert!(error.contains(name), "{error}");
        }
        assert!(Cooldown::from_code(3, Cooldown::After).is_err());
    }

    proptest! {
        #[test]
        fn carries_are_shares_and_the_last_is_zero(
            trans_alg in 0..2, ksteps in -60..60, max_steps in 0..50, lists in 1..4u64, last: bool,
        ) {
            let cooldown = if last { Cooldown::Last } else { Cooldown::After };
            let schedule = schedule(trans_alg, ksteps, max_steps, cooldown);
            let max_steps = max_steps as u64;
            for index in 0..max_steps + 5 {
                let carry = schedule.carry_weight(index, lists);
                prop_assert!((0.0..=1.0).contains(&carry));
                prop_assert!(carry == 0.0 || schedule.may_carry_from(index));
                prop_assert!(carry == 0.0 || index + lists < max_steps);
                prop_assert!((schedule.carry_weight(index + 1, lists) - carry).abs() * schedule.window as f64 <= 1.0 + 1e-9);
            }
        }
    }
}
