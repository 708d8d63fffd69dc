//! Which processors the threads of teams run on (`DL_COMM_AFFINITY`), and how soon they get one. Pure, but for [`bind`],
//! [`hurry`] and [`allowed`].
//!
//! The default binds nothing: the threads run where the launcher lets the process run, and the system moves them out of the
//! way of the framework's. That is right whenever ranks share processors. `auto` is for ranks with processors to spare: it
//! gives each rank an equal share of an unbound host (or what the launcher has bound it to) and takes team threads from the
//! end of the share, one processor each; a share that would leave none to the framework binds nothing.
//!
//! Thread rule: plain data.

use std::mem;

use rustix::process::getpid;
use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};
use serde::{Deserialize, Serialize};

use crate::error::{Error, Result};

/// Where team threads run.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Affinity {
    /// Wherever the process may.
    None,
    /// On the last processors of the rank's share.
    Auto,
    /// On these processors in turn, counted over all team threads of the host.
    List(Vec<usize>),
}

impl Affinity {
    /// From `none`, `auto`, or a list such as `0-3,8`.
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

/// The processors of a list such as `0-3,8`, as the kernel writes them too.
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

/// Where a rank and its team stand on a host.
#[derive(Debug, Clone, Copy)]
pub struct GroupPlacement {
    /// The rank among those of the host.
    pub local_rank: usize,
    /// The ranks of the host.
    pub local_size: usize,
    /// The number of the team, from 0.
    pub team: usize,
    /// Its threads on each rank.
    pub threads: usize,
}

/// The processor of each thread of a team, or nothing when they are not bound. `allowed`: what the process may run on;
/// `online`: how many processors the host has.
///
/// # Errors
/// [`Error::Invalid`] when the list has a processor that the process may not run on.
pub fn assign_cpus(
    affinity: &Affinity,
    place: GroupPlacement,
    allowed: &[usize],
    online: usize,
) -> Result<Option<Vec<usize>>> {
    let GroupPlacement { local_rank, local_size, team, threads } = place;
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

/// The processors that this process may run on, and how many the host has.
///
/// # Errors
/// [`Error::System`]
pub fn allowed() -> Result<(Vec<usize>, usize)> {
    let set = sched_getaffinity(None).map_err(|error| Error::system("asking for the processors", error))?;
    let allowed: Vec<usize> = (0..CpuSet::MAX_CPU).filter(|&cpu| set.is_set(cpu)).collect();
    let online = std::fs::read_to_string("/sys/devices/system/cpu/online").ok();
    // Where the system does not tell, the process counts as unbound.
    let online = online.and_then(|text| cpu_list(&text)).map_or(allowed.len(), |list| list.len());
    Ok((allowed, online))
}

/// The processors that a process may run on, as far as it takes to tell the processes of a host apart.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct CpuBounds {
    first: usize,
    count: usize,
}

impl CpuBounds {
    /// Those of a process that may run on `allowed`, ascending.
    pub fn of(allowed: &[usize]) -> CpuBounds {
        CpuBounds { first: allowed.first().copied().unwrap_or(0), count: allowed.len() }
    }
}

/// How many processors each of the processes of a host has for itself, at least one: those that begin with the same
/// processor share theirs.
pub fn share<'a>(bounds: impl Iterator<Item = &'a CpuBounds> + Clone) -> usize {
    let sharers = |one: &CpuBounds| bounds.clone().filter(|other| other.first == one.first).count();
    bounds.clone().map(|one| one.count / sharers(one)).min().unwrap_or(1).max(1)
}

/// Lets the calling thread run on `cpu` only.
///
/// # Errors
/// [`Error::System`]
pub fn bind(cpu: usize) -> Result<()> {
    let mut set = CpuSet::new();
    set.set(cpu);
    sched_setaffinity(None, &set).map_err(|error| Error::system(format!("binding a thread to processor {cpu}"), error))
}

/// Lets the calling thread, which may have got the processors of the thread that started it, run where the first thread of the
/// process may.
///
/// # Errors
/// [`Error::System`]
pub fn unbind() -> Result<()> {
    let set = sched_getaffinity(Some(getpid())).and_then(|set| sched_setaffinity(None, &set));
    set.map_err(|error| Error::system("letting a thread run where the process may", error))
}

/// `struct sched_attr` of sched_setattr(2), in its first version.
#[repr(C)]
struct SchedAttr {
    size: u32,
    policy: u32,
    flags: u64,
    nice: i32,
    priority: u32,
    runtime: u64,
    deadline: u64,
    period: u64,
}

/// The shortest slice that Linux takes.
const SLICE_NS: u64 = 100_000;

/// Asks for a short time slice for the calling thread: a thread of a team works in many short steps, between which it waits
/// for the other ranks. While the framework computes on all processors, Linux would let it wait for one for a whole slice of
/// the computation (some milliseconds) in every step; from Linux 6.12 on a thread that asked for a shorter slice than the
/// running one gets the processor at once (sched(7), "fair" policies: EEVDF, Stoica and Abdel-Wahab 1995). It takes no more
/// time in all than before, and needs no privilege. Elsewhere nothing changes.
pub fn request_short_slice() {
    // SAFETY: plain numbers.
    if unsafe { libc::sched_getscheduler(0) } != libc::SCHED_OTHER {
        return; // whoever chose another policy knows better
    }
    let attr = SchedAttr {
        size: mem::size_of::<SchedAttr>() as u32,
        policy: libc::SCHED_OTHER as u32,
        flags: 0,
        nice: current_nice(),
        priority: 0,
        runtime: SLICE_NS,
        deadline: 0,
        period: 0,
    };
    // SAFETY: the kernel reads `size` bytes of the structure. A kernel that does not know the wish refuses or ignores it,
    // and the thread runs as it did.
    let _granted = unsafe { libc::syscall(libc::SYS_sched_setattr, 0, &raw const attr, 0) };
}

/// The nice value that the thread has, so that it keeps it.
fn current_nice() -> i32 {
    // SAFETY: plain numbers. An error would be -1, which is a nice value too, of a process that may have it.
    unsafe { libc::getpriority(libc::PRIO_PROCESS, 0) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranks_share_what_the_launcher_has_not_dealt_out() {
        let of = |cpus: std::ops::Range<usize>| CpuBounds::of(&cpus.collect::<Vec<_>>());
        let shares = |bounds: &[CpuBounds]| share(bounds.iter());
        assert_eq!(shares(&[of(0..8); 2]), 4);
        assert_eq!(shares(&[of(0..2); 3]), 1);
        assert_eq!(shares(&[of(0..8), of(8..16)]), 8);
        assert_eq!(shares(&[of(0..8), of(8..12)]), 4);
        assert_eq!(shares(&[]), 1);
    }

    fn place(local_rank: usize, local_size: usize, team: usize, threads: usize) -> GroupPlacement {
        GroupPlacement { local_rank, local_size, team, threads }
    }

    #[test]
    fn settings_are_read() {
        assert_eq!(Affinity::parse("none"), Ok(Affinity::None));
        assert_eq!(Affinity::parse(" auto "), Ok(Affinity::Auto));
        assert_eq!(Affinity::parse("0-2, 5"), Ok(Affinity::List(vec![0, 1, 2, 5])));
        for text in ["", "all", "3-1", "1,,2", "-1", "99999999"] {
            assert!(Affinity::parse(text).unwrap_err().to_string().contains("DL_COMM_AFFINITY"), "{text}");
        }
    }

    #[test]
    fn auto_takes_the_end_of_each_share_and_never_all_of_it() {
        let cpus: Vec<usize> = (0..8).collect();
        let auto = |place| assign_cpus(&Affinity::Auto, place, &cpus, 8).unwrap();
        assert_eq!(auto(place(0, 2, 0, 2)), Some(vec![3, 2]));
        assert_eq!(auto(place(1, 2, 0, 2)), Some(vec![7, 6]));
        assert_eq!(auto(place(1, 2, 1, 2)), Some(vec![5, 7]));
        // Two ranks for each processor, or as many threads as processors: nothing is bound.
        assert_eq!(auto(place(0, 16, 0, 1)), None);
        assert_eq!(auto(place(0, 4, 0, 2)), None);
        // Bound by the launcher: the share is what it gave.
        assert_eq!(assign_cpus(&Affinity::Auto, place(1, 2, 0, 1), &[4, 5], 8), Ok(Some(vec![5])));
    }

    #[test]
    fn a_list_is_dealt_out_and_checked() {
        let list = Affinity::List(vec![1, 3]);
        assert_eq!(assign_cpus(&list, place(0, 2, 0, 1), &[0, 1, 2, 3], 4), Ok(Some(vec![1])));
        assert_eq!(assign_cpus(&list, place(1, 2, 0, 1), &[0, 1, 2, 3], 4), Ok(Some(vec![3])));
        assert_eq!(assign_cpus(&list, place(0, 2, 1, 3), &[0, 1, 2, 3], 4), Ok(Some(vec![1, 3, 1])));
        let error = assign_cpus(&list, place(0, 1, 0, 1), &[0, 1], 4).unwrap_err().to_string();
        assert!(error.contains("processor 3"), "{error}");
        assert_eq!(assign_cpus(&Affinity::None, place(0, 1, 0, 1), &[0], 1), Ok(None));
    }

    #[test]
    fn a_thread_in_a_hurry_keeps_its_policy_and_nice_value() {
        std::thread::spawn(|| {
            // SAFETY: plain numbers; the thread is the test's.
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
