//! When the averages of a team block and when they run behind the computation: the schedule of `config_team`.
//!
//! A schedule gives every call of a team a *carry*: the share of the call's own mean that is left to the next call. With
//! carries a(i), means m(i) and a(-1) = 0, call i returns
//!
//! ```text
//! (1 - a(i)) m(i) + a(i-1) m(i-1)
//! ```
//!
//! so that every mean is handed out with a total weight of exactly one, whatever the schedule. A carry of 0 is a blocking
//! call; between two carries of 1 a call starts its own average and returns the one before (staleness 1), and the caller
//! waits only for what was started a whole step ago.
//!
//! The phases are those of the Cray PE DL Plugin: a blocking warm-up of `ksteps` calls, or a blocking cool-down for a
//! negative `ksteps`. `trans_alg` 0 passes from one phase to the other at once: the first call of the non-blocking phase
//! blocks on its own mean (there is none before it), the second returns zeros (its own mean is on the way, and the one
//! before is handed out already), and the first blocking call afterwards returns the sum of its own and the one before.
//! `trans_alg` 1 spreads both ends over a window of calls in which the carry rises or falls evenly, so that a call's total
//! weight is off by no more than one part in the window's length. How the plugin smoothed is not known; this rule is ours.
//!
//! The last of `max_steps` calls blocks and hands out everything, and so do all calls after it.
//!
//! Pure; thread rule: plain data.

use crate::error::{Error, Result};

/// Where the blocking cool-down of a negative `ksteps` begins.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Cooldown {
    /// After the first `|ksteps|` calls, as the plugin's porting guide says.
    After,
    /// So that the last `|ksteps|` calls block, as the plugin of 2018 was measured to do.
    Last,
}

impl Cooldown {
    /// From `dl_comm_cooldown` of `dl_comm.h`; 0 is `default`.
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

/// The arguments of `config_team`, by the names that the plugin gives them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Arguments {
    /// 0: abrupt, 1: smooth.
    pub trans_alg: i32,
    /// Length of the blocking warm-up, or, negative, of what [`Cooldown`] says.
    pub ksteps: i32,
    /// The number of calls of the team in all.
    pub max_steps: i32,
    /// 0: silent, 1: rank 0 prints, 2: every rank prints.
    pub verbosity: i32,
    /// Every how many calls the waited time is printed; 0: at the end only.
    pub perf_freq: i32,
    /// What a negative `ksteps` counts.
    pub cooldown: Cooldown,
}

/// Who prints how long it has waited.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Verbosity {
    /// Nobody.
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

/// The schedule of a team; see the module's text.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Schedule {
    /// The non-blocking phase begins with this call.
    start: u64,
    /// The first call after the non-blocking phase.
    end: u64,
    /// Over how many calls the carry rises and falls.
    window: u64,
    max_steps: u64,
    /// Who prints.
    pub verbosity: Verbosity,
    /// Every how many calls.
    pub perf_freq: u64,
}

/// Smooth transitions take this part of `max_steps`.
const SMOOTH_PART: u64 = 20;

impl Schedule {
    /// A schedule in which every call blocks, and nothing is printed.
    pub const BLOCKING: Schedule =
        Schedule { start: 0, end: 0, window: 1, max_steps: 0, verbosity: Verbosity::Silent, perf_freq: 0 };

    /// The schedule of `config_team`.
    ///
    /// # Errors
    /// [`Error::Invalid`], naming the argument.
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

    /// The carry of call `index` (from 0) of a team whose calls are on `lists` different lists of tensors in turn: each
    /// of these must be handed out before the last call.
    pub fn carry_weight(&self, index: u64, lists: u64) -> f64 {
        let end = self.end.min(self.max_steps.saturating_sub(lists));
        if index < self.start || index >= end {
            return 0.0;
        }
        let steps = (index - self.start).min(end - index).min(self.window);
        steps as f64 / self.window as f64
    }

    /// Whether call `index` is one of the non-blocking phase.
    pub fn is_non_blocking(&self, index: u64) -> bool {
        (self.start..self.end).contains(&index)
    }

    /// Whether calls from `index` on may be carried over.
    pub fn may_carry_from(&self, index: u64) -> bool {
        self.start < self.end && index < self.end
    }

    /// Whether call `index` is one after which the waited time is printed.
    pub fn prints_at(&self, index: u64) -> bool {
        self.perf_freq > 0 && index.is_multiple_of(self.perf_freq)
    }

    /// Where call `index` stands, for messages; nothing when every call blocks.
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
    fn a_warm_up_blocks_then_runs_behind_until_the_last_call() {
        let schedule = schedule(0, 3, 8, Cooldown::After);
        assert_eq!(carries(schedule, 10), [0., 0., 0., 0., 1., 1., 1., 0., 0., 0.]);
    }

    #[test]
    fn as_many_ksteps_as_calls_or_more_always_block() {
        for ksteps in [8, 9, 100] {
            assert_eq!(carries(schedule(0, ksteps, 8, Cooldown::After), 10), [0.; 10]);
        }
        assert_eq!(carries(schedule(0, -8, 8, Cooldown::Last), 10), [0.; 10]);
        assert_eq!(carries(Schedule::BLOCKING, 10), [0.; 10]);
        assert!(!Schedule::BLOCKING.may_carry_from(0));
    }

    #[test]
    fn a_cool_down_begins_after_or_fills_the_last_calls() {
        assert_eq!(carries(schedule(0, -6, 8, Cooldown::After), 8), [0., 1., 1., 1., 1., 1., 0., 0.]);
        assert_eq!(carries(schedule(0, -6, 8, Cooldown::Last), 8), [0., 1., 0., 0., 0., 0., 0., 0.]);
        // The whole time non-blocking: the last call still hands everything out.
        assert_eq!(carries(schedule(0, -8, 8, Cooldown::After), 8), [0., 1., 1., 1., 1., 1., 1., 0.]);
    }

    #[test]
    fn a_smooth_transition_rises_and_falls_over_a_twentieth() {
        let schedule = schedule(1, 10, 80, Cooldown::After);
        let carries = carries(schedule, 80);
        assert_eq!(carries[9..16], [0., 0., 0.25, 0.5, 0.75, 1., 1.]);
        assert_eq!(carries[74..], [1., 1., 0.75, 0.5, 0.25, 0.]);
    }

    #[test]
    fn each_of_several_lists_is_handed_out() {
        let schedule = schedule(0, 2, 10, Cooldown::After);
        let carries: Vec<f64> = (0..10).map(|index| schedule.carry_weight(index, 3)).collect();
        assert_eq!(carries, [0., 0., 0., 1., 1., 1., 1., 0., 0., 0.]);
    }

    #[test]
    fn nonsense_names_the_argument() {
        let good =
            Arguments { trans_alg: 0, ksteps: 1, max_steps: 2, verbosity: 1, perf_freq: 1, cooldown: Cooldown::After };
        for (name, bad) in [
            ("trans_alg", Arguments { trans_alg: 2, ..good }),
            ("max_steps", Arguments { max_steps: -1, ..good }),
            ("verbosity", Arguments { verbosity: 3, ..good }),
            ("perf_freq", Arguments { perf_freq: -1, ..good }),
        ] {
            let error = Schedule::new(bad).unwrap_err().to_string();
            assert!(error.contains(name), "{error}");
        }
        assert!(Cooldown::from_code(3, Cooldown::After).is_err());
    }

    proptest! {
        #[test]
        fn carries_are_shares_and_nothing_is_left_at_the_end(
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
