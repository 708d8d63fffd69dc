//! Helpers: processes that a rank has started, which are not ranks. Workers of a data loader are some, forked or spawned, and
//! so is any program that a script calls. They know the rank's numbers, and cannot communicate.
//!
//! A rank leaves a mark in the environment when it is up. It holds for processes that have it and the launcher's variables
//! as they were then: those whom another launcher has started are ranks of their own.
//! Thread rule: everything may be called from any thread.

use std::sync::OnceLock;

use serde::{Deserialize, Serialize};

use crate::error::Error;
use crate::fork;
use crate::topology::Topology;
use crate::transport::bootstrap::{identity, launched, leave_launcher};

/// The variable.
pub const MARK: &str = "DL_COMM_HELPER_OF";

/// What a rank knows of itself, and its helpers of it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct RankPosition {
    /// The rank.
    pub rank: usize,
    /// The number of ranks.
    pub size: usize,
    /// The rank among those of its host.
    pub local_rank: usize,
    /// The number of ranks of its host.
    pub local_size: usize,
    /// The number of hosts.
    pub hosts: usize,
    /// The rank's process.
    pub pid: u32,
}

/// This process's, once it is a rank; forked children have it too, and may find locks held.
static MINE: OnceLock<RankPosition> = OnceLock::new();

fn lookup(name: &str) -> Option<String> {
    std::env::var(name).ok()
}

/// Whether the user wants this process to be a job of its own, whoever has started it.
fn alone() -> bool {
    lookup("DL_COMM_ALONE").is_some_and(|value| value.trim() == "1")
}

/// Notes that this process is a rank, here and, where a launcher has started it, for the processes that it will start. These
/// do not get the launcher's connection: with it they could act in this rank's name.
pub fn mark(topology: &Topology) {
    let (rank, size, hosts) = (topology.rank(), topology.size(), topology.hosts());
    let (local_rank, local_size) = (topology.local_rank(), topology.local_size());
    let info = RankPosition { rank, size, local_rank, local_size, hosts, pid: std::process::id() };
    let _first = MINE.set(info);
    if size > 1 || (launched(lookup) && !alone()) {
        leave_launcher();
        // SAFETY: as in `leave_launcher`.
        unsafe { std::env::set_var(MARK, encode(&info, identity(lookup))) };
    }
}

/// What is known of the rank that this process is, or helps.
pub fn info() -> Option<RankPosition> {
    MINE.get().copied().or_else(marked)
}

fn marked() -> Option<RankPosition> {
    let (info, launcher) = decode(&lookup(MARK)?)?;
    (launcher == identity(lookup) && !alone()).then_some(info)
}

/// Why this process cannot communicate, if it is a helper.
pub fn refusal() -> Option<Error> {
    if fork::is_child() {
        let owner = MINE.get().map_or(0, |info| info.pid);
        return Some(Error::State(format!(
            "this process was forked from process {owner}, which uses dl_comm; a forked child knows rank and size and cannot \
             communicate: do that in the rank itself"
        )));
    }
    let RankPosition { rank, pid, .. } = marked().filter(|_| MINE.get().is_none())?;
    Some(Error::State(format!(
        "this process is a helper of rank {rank} (pid {pid}), which has started it: it knows rank and size and cannot \
         communicate; do that in the rank itself, or start it with a launcher, or with DL_COMM_ALONE=1, for a job of its own"
    )))
}

/// The value of [`MARK`]: a rank's position and the identity of its launcher.
fn encode(position: &RankPosition, launcher: u64) -> String {
    serde_json::json!([position, launcher]).to_string()
}

fn decode(text: &str) -> Option<(RankPosition, u64)> {
    serde_json::from_str(text).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_mark_goes_there_and_back() {
        let info = RankPosition { rank: 3, size: 8, local_rank: 1, local_size: 2, hosts: 4, pid: 77 };
        assert_eq!(decode(&encode(&info, u64::MAX)), Some((info, u64::MAX)));
        for text in ["", "1 2 3", "a b c d e f g", "-1 2 3 4 5 6 7", "1 2 3 4 5 99999999999 7"] {
            assert_eq!(decode(text), None, "{text}");
        }
    }
}
