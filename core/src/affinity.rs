//! CPU affinity of group threads (`DL_COMM_AFFINITY`) and their time slice. Pure, except [`bind`], [`unbind`],
//! [`request_short_slice`] and [`allowed`].
//!
//! The default binds no thread: threads run on the process's CPUs, and the scheduler keeps them apart from the
//! framework's threads. That is right when ranks share CPUs. `auto` is for ranks with spare CPUs. It gives each rank an
//! equal share of an unbound host, or the CPUs that the launcher bound. Group threads take one CPU each from the end of
//! the share. A share that would leave the framework no CPU binds nothing.
//!
//! A failed system call is an [`Error::System`].
//! Thread rule: plain data.

use rustix::process::getpid;
use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};
use serde::{Deserialize, Serialize};

use crate::error::{Error, Result};

/// CPUs of group threads.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Affinity {
    /// Any CPU of the process.
    None,
    /// The last CPUs of the rank's share.
    Auto,
    /// These CPUs in turn, counted over all group threads of the host.
    List(Vec<usize>),
}

impl Affinity {
    /// Parses `none`, `auto`, or a list such as `0-3,8`.
    ///
    /// # Errors
    /// [`Error::Invalid`]
    pub fn parse(text: &str) -> Result<Affinity> {
        match text.trim() {
            "none" => Ok(Affinity::None),
            "auto" => Ok(Affinity::Auto),
            list => cpu_list(list).map(Affinity::List).ok_or_else(|| {
                Error::Invalid(format!(
                    "DL_COMM_AFFINITY is '{text}'; set it to 'none', 'auto', or a list of processors such as '0-3,8'"
                ))
            }),
        }
    }
}

/// Parses a CPU list such as `0-3,8` (also the kernel's format).
fn cpu_list(text: &str) -> Option<Vec<usize>> {
    let mut list = Vec::new();
    for part in text.trim().split(',') {
        let (first, last) = part.split_once('-').unwrap_or((part, part));
        let (first, last) = (first.trim().parse::<usize>().ok()?, last.trim().parse::<usize>().ok()?);
        if first > last || last >= CpuSet::MAX_CPU {
            return None;
        }
        list.extend(first..=last);
    }
    Some(list)
}

/// Position of a group's threads on a host.
#[derive(Debug, Clone, Copy)]
pub struct GroupPlacement {
    /// Local rank.
    pub local_rank: usize,
    /// Number of ranks on the host.
    pub local_size: usize,
    /// Index of the group, from 0.
    pub team: usize,
    /// Threads of the group on each rank.
    pub threads: usize,
}

/// The CPU of each thread of a group, or `None` when threads are not bound. `allowed`: CPUs of the process; `online`:
/// number of CPUs of the host.
///
/// # Errors
/// [`Error::Invalid`] when the list contains a CPU outside `allowed`.
pub fn assign_cpus(
    affinity: &Affinity,
    placement: GroupPlacement,
    allowed: &[usize],
    online: usize,
) -> Result<Option<Vec<usize>>> {
    let GroupPlacement { local_rank, local_size, team, threads } = placement;
    match affinity {
        Affinity::None => Ok(None),
        Affinity::Auto => {
            let share = if allowed.len() == online {
                let len = allowed.len() / local_size;
                &allowed[local_rank * len..(local_rank + 1) * len]
            } else {
                allowed
            };
            let spare = share.len().saturating_sub(1);
            if spare < threads {
                return Ok(None);
            }
            Ok(Some((0..threads).map(|index| share[share.len() - 1 - (team * threads + index) % spare]).collect()))
        }
        Affinity::List(list) => {
            if let Some(cpu) = list.iter().find(|cpu| !allowed.contains(cpu)) {
                return Err(Error::Invalid(format!(
                    "DL_COMM_AFFINITY names processor {cpu}, on which this process may not run (it may on {allowed:?})"
                )));
            }
            let first = (team * local_size + local_rank) * threads;
            Ok(Some((first..first + threads).map(|index| list[index % list.len()]).collect()))
        }
    }
}

/// The CPUs that this process may use, and the number of CPUs of the host.
pub fn allowed() -> Result<(Vec<usize>, usize)> {
    let set = sched_getaffinity(None).map_err(|error| Error::system("asking for the processors", error))?;
    let allowed: Vec<usize> = (0..CpuSet::MAX_CPU).filter(|&cpu| set.is_set(cpu)).collect();
    let online = std::fs::read_to_string("/sys/devices/system/cpu/online").ok();
    // Without this file, treat the process as unbound.
    let online = online.and_then(|text| cpu_list(&text)).map_or(allowed.len(), |list| list.len());
    Ok((allowed, online))
}

/// Summary of a process's CPU set: enough to compare the processes of a host.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct CpuBounds {
    first: usize,
    count: usize,
}

impl CpuBounds {
    /// The bounds of `allowed`, which is ascending.
    pub fn of(allowed: &[usize]) -> CpuBounds {
        CpuBounds { first: allowed.first().copied().unwrap_or(0), count: allowed.len() }
    }
}

/// The smallest number of CPUs per process on a host; 0: some processes share a CPU. Processes whose sets start at the
/// same CPU share that set.
pub fn share<'a>(bounds: impl Iterator<Item = &'a CpuBounds> + Clone) -> usize {
    let sharers = |one: &CpuBounds| bounds.clone().filter(|other| other.first == one.first).count();
    bounds.clone().map(|one| one.count / sharers(one)).min().unwrap_or(1)
}

/// Binds the calling thread to `cpu`.
pub fn bind(cpu: usize) -> Result<()> {
    let mut set = CpuSet::new();
    set.set(cpu);
    sched_setaffinity(None, &set).map_err(|error| Error::system(format!("binding a thread to processor {cpu}"), error))
}

/// Gives the calling thread the CPU set of the process's main thread. A new thread inherits the set of its parent,
/// which may be bound.
pub fn unbind() -> Result<()> {
    let set = sched_getaffinity(Some(getpid())).and_then(|set| sched_setaffinity(None, &set));
    set.map_err(|error| Error::system("letting a thread run where the process may", error))
}

/// The minimum slice that Linux accepts.
const SLICE_NS: u64 = 100_000;

/// Requests a short time slice for the calling thread. A group thread alternates between short work and waits for other
/// ranks. When the framework occupies all CPUs, Linux would delay each wake-up by a whole slice (some milliseconds).
/// From Linux 6.12, a thread with a shorter slice preempts the running thread at once (sched(7), EEVDF: Stoica and
/// Abdel-Wahab 1995). The thread's total CPU share is unchanged, and no privilege is needed. Older kernels ignore the
/// request.
pub fn request_short_slice() {
    // SAFETY: passes integers only.
    if unsafe { libc::sched_getscheduler(0) } != libc::SCHED_OTHER {
        return; // keep a policy that the program has set
    }
    let attr = libc::sched_attr {
        size: size_of::<libc::sched_attr>() as u32,
        sched_policy: libc::SCHED_OTHER as u32,
        sched_flags: 0,
        // SAFETY: passes integers only. The error value -1 is also a valid nice value, so it is harmless.
        sched_nice: unsafe { libc::getpriority(libc::PRIO_PROCESS, 0) },
        sched_priority: 0,
        sched_runtime: SLICE_NS,
        sched_deadline: 0,
        sched_period: 0,
    };
    // SAFETY: the kernel reads `size` bytes of the structure. An unsupported request fails or is ignored, without
    // effect.
    let _granted = unsafe { libc::syscall(libc::SYS_sched_setattr, 0, &raw const attr, 0) };
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranks_with_the_same_cpus_share_them() {
        let of = |cpus: std::ops::Range<usize>| CpuBounds::of(&cpus.collect::<Vec<_>>());
        let shares = |bounds: &[CpuBounds]| share(bounds.iter());
        assert_eq!(shares(&[of(0..8); 2]), 4);
        assert_eq!(shares(&[of(0..2); 3]), 0);
        assert_eq!(shares(&[of(0..8), of(8..16)]), 8);
        assert_eq!(shares(&[of(0..8), of(8..12)]), 4);
        assert_eq!(shares(&[]), 1);
    }

    fn placement(local_rank: usize, local_size: usize, team: usize, threads: usize) -> GroupPlacement {
        GroupPlacement { local_rank, local_size, team, threads }
    }

    #[test]
    fn settings_are_parsed() {
        assert_eq!(Affinity::parse("none"), Ok(Affinity::None));
        assert_eq!(Affinity::parse(" auto "), Ok(Affinity::Auto));
        assert_eq!(Affinity::parse("0-2, 5"), Ok(Affinity::List(vec![0, 1, 2, 5])));
        for text in ["", "all", "3-1", "1,,2", "-1", "99999999"] {
            assert!(Affinity::parse(text).unwrap_err().to_string().contains("DL_COMM_AFFINITY"), "{text}");
        }
    }

    #[test]
    fn auto_takes_the_end_of_each_share_and_leaves_one_cpu() {
        let cpus: Vec<usize> = (0..8).collect();
        let auto = |placement| assign_cpus(&Affinity::Auto, placement, &cpus, 8).unwrap();
        assert_eq!(auto(placement(0, 2, 0, 2)), Some(vec![3, 2]));
        assert_eq!(auto(placement(1, 2, 0, 2)), Some(vec![7, 6]));
        assert_eq!(auto(placement(1, 2, 1, 2)), Some(vec![5, 7]));
        // More ranks than CPUs, or as many threads as CPUs: no binding.
        assert_eq!(auto(placement(0, 16, 0, 1)), None);
        assert_eq!(auto(placement(0, 4, 0, 2)), None);
        // Bound by the launcher: the share is the bound set.
        assert_eq!(assign_cpus(&Affinity::Auto, placement(1, 2, 0, 1), &[4, 5], 8), Ok(Some(vec![5])));
    }

    #[test]
    fn a_list_is_assigned_in_turn_and_checked() {
        let list = Affinity::List(vec![1, 3]);
        assert_eq!(assign_cpus(&list, placement(0, 2, 0, 1), &[0, 1, 2, 3], 4), Ok(Some(vec![1])));
        assert_eq!(assign_cpus(&list, placement(1, 2, 0, 1), &[0, 1, 2, 3], 4), Ok(Some(vec![3])));
        assert_eq!(assign_cpus(&list, placement(0, 2, 1, 3), &[0, 1, 2, 3], 4), Ok(Some(vec![1, 3, 1])));
        let error = assign_cpus(&list, placement(0, 1, 0, 1), &[0, 1], 4).unwrap_err().to_string();
        assert!(error.contains("processor 3"), "{error}");
        assert_eq!(assign_cpus(&Affinity::None, placement(0, 1, 0, 1), &[0], 1), Ok(None));
    }

    #[test]
    fn a_short_slice_keeps_policy_and_nice_value() {
        std::thread::spawn(|| {
            // SAFETY: passes integers only; the test owns the thread.
            let (nice, policy) = unsafe {
                libc::setpriority(libc::PRIO_PROCESS, 0, 3);
                request_short_slice();
                (libc::getpriority(libc::PRIO_PROCESS, 0), libc::sched_getscheduler(0))
            };
            assert_eq!((nice, policy), (3, libc::SCHED_OTHER));
        })
        .join()
        .unwrap();
    }

    #[test]
    fn a_thread_is_bound() {
        let (cpus, online) = allowed().unwrap();
        assert!(!cpus.is_empty() && cpus.len() <= online);
        std::thread::spawn(move || {
            bind(cpus[0]).unwrap();
            assert_eq!(allowed().unwrap().0, [cpus[0]]);
        })
        .join()
        .unwrap();
    }
}
