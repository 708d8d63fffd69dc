//! Helper processes: processes started by a rank that are not ranks themselves, such as data loader workers (forked or
//! spawned). A helper can query rank and size, but cannot communicate.
//!
//! A started rank sets [`MARK`] in its environment. The mark is valid only in processes with the same launcher
//! variables: a process started by another launcher is a rank of its own.
//! Thread rule: all functions may be called from any thread.

use std::ptr;
use std::sync::atomic::{AtomicPtr, Ordering};

use serde::{Deserialize, Serialize};

use crate::error::Error;
use crate::fork;
use crate::topology::Topology;
use crate::transport::launcher::{identity, launched, leave_launcher, torchrun_identity};

/// The environment variable that marks helpers.
pub const MARK: &str = "DL_COMM_HELPER_OF";

/// Who has made a process a rank.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum StartedBy {
    /// A launcher that starts the message library: mpiexec, srun, PALS.
    Mpiexec,
    /// torchrun, by its store.
    Torchrun,
    /// An indexed job of Kubernetes.
    Kubernetes,
    /// The variables of plain processes.
    Variables,
    /// The program, by numbers and an address.
    Arguments,
    /// The program, by a store.
    Store,
    /// Nobody: it is alone.
    None,
}

/// Position of a rank in its job, also known to its helpers.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct RankPosition {
    /// World rank.
    pub rank: usize,
    /// Number of ranks in the job.
    pub size: usize,
    /// Rank within the host.
    pub local_rank: usize,
    /// Number of ranks on the host.
    pub local_size: usize,
    /// Number of hosts in the job.
    pub hosts: usize,
    /// Process id of the rank.
    pub pid: u32,
    /// Who has made it a rank.
    pub launcher: StartedBy,
}

/// Position of this process, set when it becomes a rank. Forked children inherit it. No mutex: a child may inherit it
/// locked. A value is never freed.
static POSITION: AtomicPtr<RankPosition> = AtomicPtr::new(ptr::null_mut());

fn position() -> Option<RankPosition> {
    // SAFETY: null, or a value that lives for ever and is not changed.
    unsafe { POSITION.load(Ordering::Acquire).as_ref() }.copied()
}

fn lookup(name: &str) -> Option<String> {
    std::env::var(name).ok()
}

/// Whether the user made this process a job of one rank, whatever started it.
fn runs_alone() -> bool {
    lookup("DL_COMM_ALONE").is_some_and(|value| value.trim() == "1")
}

/// Records that this process is a rank. If others are too, or a launcher started it, also marks its future child
/// processes. With `uses_launcher`, removes the launcher's connection from their environment: a child could act as this
/// rank through it.
pub fn mark(topology: &Topology, launcher: StartedBy, uses_launcher: bool) {
    let (rank, size, hosts) = (topology.rank(), topology.size(), topology.hosts());
    let (local_rank, local_size) = (topology.local_rank(), topology.local_size());
    let info = RankPosition { rank, size, local_rank, local_size, hosts, pid: std::process::id(), launcher };
    POSITION.store(Box::into_raw(Box::new(info)), Ordering::Release);
    let is_launched = matches!(launcher, StartedBy::Torchrun | StartedBy::Kubernetes);
    if size > 1 || is_launched || (uses_launcher && launched(lookup) && !runs_alone()) {
        if uses_launcher {
            leave_launcher();
        }
        let mark = encode(&info, identity(lookup), &torchrun_identity(lookup));
        if lookup(MARK).as_ref() != Some(&mark) {
            // SAFETY: no other thread accesses the environment: this is a part of the process's start.
            unsafe { std::env::set_var(MARK, mark) };
        }
    }
}

/// The position of this rank, or of the rank that this helper belongs to.
pub fn info() -> Option<RankPosition> {
    position().or_else(marked)
}

fn marked() -> Option<RankPosition> {
    let (info, launcher, _) = decode(&lookup(MARK)?)?;
    (launcher == identity(lookup) && !runs_alone()).then_some(info)
}

/// The error that a helper gets when it tries to communicate.
pub fn refusal() -> Option<Error> {
    if fork::is_child() {
        let owner = position().map_or(0, |info| info.pid);
        return Some(Error::State(format!(
            "this process was forked from process {owner}, which uses dl_comm; a forked child knows rank and size and cannot \
             communicate: do that in the rank itself"
        )));
    }
    let RankPosition { rank, pid, .. } = marked().filter(|_| position().is_none())?;
    Some(Error::State(format!(
        "this process is a helper of rank {rank} (pid {pid}), which has started it: it knows rank and size and cannot \
         communicate; do that in the rank itself, or start it with a launcher, or with DL_COMM_ALONE=1, for a job of its own"
    )))
}

/// The value of [`MARK`]: a rank's position, the identity of its launcher, and the variables of torchrun. By these,
/// `python/dl_comm/_job/torchrun.py` sees that another launcher has started a process inside of a rank of torchrun.
fn encode(position: &RankPosition, launcher: u64, torchrun: &[String]) -> String {
    serde_json::json!([position, launcher, torchrun]).to_string()
}

fn decode(text: &str) -> Option<(RankPosition, u64, Vec<String>)> {
    serde_json::from_str(text).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn marks_round_trip() {
        let info = RankPosition {
            rank: 3,
            size: 8,
            local_rank: 1,
            local_size: 2,
            hosts: 4,
            pid: 77,
            launcher: StartedBy::None,
        };
        let torchrun = vec!["none".to_owned(), String::new()];
        assert_eq!(decode(&encode(&info, u64::MAX, &torchrun)), Some((info, u64::MAX, torchrun)));
        for text in ["", "1 2 3", "a b c d e f g", "-1 2 3 4 5 6 7", "1 2 3 4 5 99999999999 7"] {
            assert_eq!(decode(text), None, "{text}");
        }
    }
}
