//! Creation of teams and of groups of some ranks: what their members agree on, processors and threads.
//!
//! Thread rule: any thread. Teams are made one at a time, in the same order on all ranks.

use std::sync::{Arc, Mutex, Weak};
use std::time::Duration;

use super::collectives::barrier;
use super::state::{RuntimeState, config, find_team, not_started, started, topology, write};
use crate::affinity::{self, GroupPlacement};
use crate::collective::AlgorithmSetting;
use crate::collective::device::{DeviceSettings, PathSetting};
use crate::config::{Config, MAX_THREADS};
use crate::deadline::{Deadline, SetBy};
use crate::error::{Error, Result};
use crate::group::{Group, OnFailure, Timeout};
use crate::group_config::GroupConfig;
use crate::group_key::{GroupKey, GroupName, Members};
use crate::lock::lock;
use crate::plugin::Team;
use crate::transport::MAX_DEFAULT_SLOT;
use crate::wire_layout::ALIGN;

/// Held while a team is created, so that all ranks create teams in the order of their calls.
static CREATE_LOCK: Mutex<()> = Mutex::new(());

/// How long the threads of a group of some ranks stay without calls.
const IDLE_TIMEOUT: Duration = Duration::from_secs(1);

/// Creates team `id`. With `call`, a description of the caller's request, the ranks first agree on it.
pub(super) fn make_team(id: i32, threads: usize, prec_level: u8, call: Option<&str>) -> Result<()> {
    let _guard = lock(&CREATE_LOCK);
    if find_team(id)?.is_some() {
        return Ok(());
    }
    if let Some(call) = call {
        // A barrier with this name detects ranks with other calls.
        barrier(call, Timeout::GroupDefault)?;
    }
    let config = config()?;
    let cpus = processors(&config, id, threads);
    let topology = topology()?;
    let members = Members::World { size: topology.size(), me: topology.rank() };
    let settings = GroupConfig { threads, acc_f64: prec_level == 1, ..group_config(&config, topology.hosts()) };
    let name = GroupKey::team(id).name().clone();
    let group = make_group(name, &members, settings, cpus)?;
    // The threads of a team are there from the start, on their processors.
    let team = group.prepare().map(|()| Arc::new(Team::new(Arc::new(group))));
    let job = started(|runtime| Ok(Arc::clone(&runtime.job)))?;
    let team = job.confirm(&format!("the creation of team {id}"), team)?;
    drop(job);
    write(|state| match state {
        RuntimeState::Started(runtime) => {
            runtime.dumper.add(team.group());
            runtime.teams.insert(id, team);
            Ok(())
        }
        _ => Err(not_started()),
    })
}

/// Settings of a group that differ from those of the process.
#[derive(Debug, Clone, Default)]
pub struct GroupOptions<'a> {
    /// The number of threads.
    pub threads: Option<usize>,
    /// The deadline of calls; inner `None` for none.
    pub timeout: Option<Option<Duration>>,
    /// The algorithm between hosts: a value of `DL_COMM_ALGORITHM`.
    pub algorithm: Option<&'a str>,
    /// The path for tensors in GPU memory: a value of `DL_COMM_GPU_PATH`.
    pub gpu_path: Option<&'a str>,
}

impl GroupOptions<'_> {
    fn apply(&self, mut settings: GroupConfig) -> Result<GroupConfig> {
        if let Some(threads) = self.threads {
            if !(1..=MAX_THREADS).contains(&threads) {
                return Err(Error::Invalid(format!("threads is {threads}; a group has from 1 to {MAX_THREADS}")));
            }
            settings.threads = threads;
        }
        if let Some(after) = self.timeout {
            settings.timeout = Deadline { after, set_by: SetBy::Group };
        }
        let refused = |argument: &str, error: Error| Error::Invalid(format!("{argument}: {}", error.detail()));
        if let Some(name) = self.algorithm {
            settings.algorithm = AlgorithmSetting::parse(name).map_err(|error| refused("algorithm", error))?;
        }
        if let Some(name) = self.gpu_path {
            settings.device.path = PathSetting::parse(name).map_err(|error| refused("gpu_path", error))?;
        }
        Ok(settings)
    }
}

/// Creates a group of the ranks `ranks` of the job, in this order; its rank i is `ranks[i]`. Called by these ranks only,
/// with the same arguments: from any thread, and at the same time as other groups. All members must make groups with the
/// same name and members in the same order. Its memory and threads are made by the first call that needs them.
///
/// # Errors
/// [`Error::Invalid`] when this rank is no member, a rank is not in the job or listed twice, or for invalid options. Equal on all members:
/// those of [`Job::create_group`](crate::transport::job::Job::create_group).
pub fn create_group(name: &str, ranks: &[usize], options: &GroupOptions<'_>) -> Result<Arc<Group>> {
    create_group_if(name, ranks, options, Ok(()))
}

/// As [`create_group`], unless this rank has an error, which all members get.
///
/// # Errors
/// As for [`create_group`], and the error of a member.
pub(super) fn create_group_if(
    name: &str,
    ranks: &[usize],
    options: &GroupOptions<'_>,
    valid: Result<()>,
) -> Result<Arc<Group>> {
    let (config, topology) = (config()?, topology()?);
    let members = Members::list(ranks, topology.rank(), topology.size())?;
    let settings = GroupConfig { idle_timeout: Some(IDLE_TIMEOUT), ..group_config(&config, topology.hosts()) };
    // An error goes to all members, which otherwise wait.
    let (settings, valid) = match options.apply(settings).and_then(|applied| valid.map(|()| applied)) {
        Ok(settings) => (settings, Ok(None)),
        Err(error) => (settings, Err(error)),
    };
    let group = Arc::new(make_group(GroupName::Named(name.into()), &members, settings, valid)?);
    write(|state| match state {
        RuntimeState::Started(runtime) => {
            runtime.dumper.add(&group);
            runtime.groups.retain(|_, group| group.strong_count() > 0);
            runtime.groups.insert(group.number(), Arc::downgrade(&group));
            Ok(group)
        }
        _ => Err(not_started()),
    })
}

/// Agrees with the other members on a group, and starts it on the processors `cpus`.
fn make_group(
    name: GroupName,
    members: &Members,
    settings: GroupConfig,
    cpus: Result<Option<Vec<usize>>>,
) -> Result<Group> {
    let (job, dumper, process_groups) = started(|runtime| {
        Ok((Arc::clone(&runtime.job), Arc::downgrade(&runtime.dumper), Arc::clone(&runtime.process_groups)))
    })?;
    let ready = cpus.as_ref().map(drop).map_err(Error::clone);
    let creating = process_groups.creating(format!("the creation of {name}"));
    let resources = job.create_group(name, members, &settings, ready, &*process_groups)?;
    drop(creating);
    let on_failure: OnFailure = Arc::new(move |text: &str| {
        Weak::upgrade(&dumper).into_iter().for_each(|dumper| dumper.write_on_failure(text));
    });
    Group::start(resources, settings, cpus?.as_deref(), on_failure, &process_groups)
}

/// The settings of a group in a job on `hosts` hosts.
fn group_config(config: &Config, hosts: usize) -> GroupConfig {
    let slot = config.chunk_bytes.map(|bytes| bytes.next_multiple_of(ALIGN));
    // Between hosts a slice of a chunk is sent in messages of at most a slot.
    let max_chunk = if hosts > 1 { slot.unwrap_or(MAX_DEFAULT_SLOT) } else { usize::MAX };
    let chunk = config.device.chunk.min(max_chunk).next_multiple_of(ALIGN);
    GroupConfig {
        threads: config.default_nthreads,
        idle_timeout: None,
        slot,
        acc_f64: config.default_prec_level == 1,
        algorithm: config.algorithm,
        selection: config.selection,
        device: DeviceSettings { chunk, ..config.device },
        timeout: Deadline { after: config.timeout, set_by: SetBy::Environment },
        stall_warn: config.stall_warn,
        match_timeout: config.match_timeout,
    }
}

/// The processors for the team's threads, if they are pinned.
fn processors(config: &Config, id: i32, threads: usize) -> Result<Option<Vec<usize>>> {
    // The control team is not used in training, so its threads are not pinned.
    let Ok(team) = usize::try_from(id) else { return Ok(None) };
    let topology = topology()?;
    let (local_rank, local_size) = (topology.local_rank(), topology.local_size());
    let (allowed, online) = affinity::allowed()?;
    affinity::assign_cpus(&config.affinity, GroupPlacement { local_rank, local_size, team, threads }, &allowed, online)
}
