//! The time that callers of a team wait for communication, and the plugin's printed lines.
//!
//! Thread rule: may be used from any thread.

use std::io::Write;
use std::sync::Mutex;
use std::time::{Duration, Instant};

use crate::lock::lock;
use crate::timeline;

/// The total wait of one team.
pub(super) struct WaitTime {
    team: i32,
    rank: usize,
    seconds: Mutex<f64>,
}

impl WaitTime {
    pub fn new(team: i32, rank: usize) -> WaitTime {
        WaitTime { team, rank, seconds: Mutex::new(0.0) }
    }

    /// Adds a wait of a caller.
    pub fn add(&self, seconds: f64) {
        *lock(&self.seconds) += seconds;
        if timeline::is_on() {
            let now = Instant::now();
            let from = now.checked_sub(Duration::from_secs_f64(seconds.max(0.0))).unwrap_or(now);
            timeline::span("exposed", "waits for communication", from, now, &[("team", self.team.into())]);
        }
    }

    /// The total in seconds.
    pub fn total(&self) -> f64 {
        *lock(&self.seconds)
    }

    /// Prints the total after `calls` calls, in the format of the Cray PE DL Plugin.
    pub fn report(&self, calls: u64) {
        print(&format!(
            "Rank {} has waited a total of {:.6} seconds for communication to complete so far on team {} (calls = {calls})",
            self.rank,
            self.total(),
            self.team
        ));
    }
}

/// Prints the total of all teams, in the format of the Cray PE DL Plugin.
pub(super) fn print_total(rank: usize, seconds: f64) {
    print(&format!(
        "Rank {rank} waited a total of {seconds:.6} seconds for communication to complete summed across all thread teams"
    ));
}

/// Writes a line to standard output in one write, so that lines of several ranks do not mix. Write errors are ignored.
fn print(line: &str) {
    let mut out = std::io::stdout().lock();
    let _ignored = out.write_all(format!("{line}\n").as_bytes()).and_then(|()| out.flush());
}
