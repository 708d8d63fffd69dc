//! Creation of a team: memory, links, processors and threads.
//!
//! Thread rule: one team at a time, in the same order on all ranks.

use std::sync::{Arc, Mutex};

use super::calls::{barrier, wait};
use super::state::{RuntimeState, config, find_team, not_started, started, topology, write};
use crate::affinity::{self, GroupPlacement};
use crate::collective::device::DeviceSettings;
use crate::config::Config;
use crate::error::{Error, Result};
use crate::group::Group;
use crate::group_config::GroupConfig;
use crate::lock::lock;
use crate::plugin::Team;
use crate::wire_layout::ALIGN;

/// Held while a team is created, so that all ranks create teams in the order of their calls.
static CREATE_LOCK: Mutex<()> = Mutex::new(());

/// Creates team `id`. With `call`, a description of the caller's request, the ranks first agree on it.
pub(super) fn make_team(id: i32, threads: usize, prec_level: u8, call: Option<&str>) -> Result<()> {
    let _guard = lock(&CREATE_LOCK);
    if find_team(id)?.is_some() {
        return Ok(());
    }
    if let Some(call) = call {
        // A barrier with this name detects ranks with other calls.
        wait(call, barrier)?;
    }
    let config = config()?;
    let (job, dumper, process_groups) = started(|runtime| {
        Ok((Arc::clone(&runtime.job), Arc::clone(&runtime.dumper), Arc::clone(&runtime.process_groups)))
    })?;
    let cpus = processors(&config, id, threads);
    let slot = config.chunk_bytes.next_multiple_of(ALIGN);
    // Between hosts a slice of a chunk is sent in messages of at most a slot.
    let max_chunk = if topology()?.hosts() > 1 { slot } else { usize::MAX };
    let chunk = config.device.chunk.min(max_chunk).next_multiple_of(ALIGN);
    let settings = GroupConfig {
        id,
        threads,
        slot,
        acc_f64: prec_level == 1,
        algorithm: config.algorithm,
        device: DeviceSettings { chunk, ..config.device },
        timeout: config.timeout,
        stall_warn: config.stall_warn,
        match_timeout: config.match_timeout,
    };
    let job = lock(&job);
    let resources = job.endpoint(&settings, cpus.as_ref().map(drop).map_err(Error::clone))?;
    let cpus = cpus?;
    let failure_dumper = Arc::clone(&dumper);
    let on_failure = Arc::new(move |text: &str| failure_dumper.write_on_failure(text));
    let group = Group::start(resources, settings, cpus.as_deref(), on_failure, &process_groups);
    let team = group.map(|group| Arc::new(Team::new(group)));
    let team = job.confirm(&format!("the creation of team {id}"), team)?;
    drop(job);
    dumper.add(team.group());
    write(|state| match state {
        RuntimeState::Started(runtime) => {
            runtime.teams.insert(id, team);
            Ok(())
        }
        _ => Err(not_started()),
    })
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
