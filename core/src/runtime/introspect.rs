//! What this process has to tell of itself: files, numbers, an overview.

use std::path::PathBuf;
use std::sync::Arc;

use super::state::{Runtime, RuntimeState, check_fork, read, started};
use crate::collective::CallConfig;
use crate::config::Config;
use crate::error::Result;
use crate::timeline;
use crate::topology::Topology;
use crate::transport::NetworkModel;
use crate::transport::bootstrap::RankInfo;

/// Writes this rank's last calls into `folder`, or where `DL_COMM_DUMP_DIR` says; returns the file.
///
/// # Errors
/// [`Error::State`] before [`init_mpi`] and after [`finalize`]; [`Error::System`].
pub fn dump(folder: Option<&str>) -> Result<PathBuf> {
    let dumper = started(|runtime| Ok(Arc::clone(&runtime.dumper)))?;
    dumper.write("requested", folder)
}

/// Starts the timeline of this rank in `folder`.
///
/// # Errors
/// As for [`dump`]; [`Error::State`] when one is being recorded.
pub fn start_timeline(folder: &str) -> Result<()> {
    let (rank, title, job) = started(|runtime| {
        let rank = runtime.topology.rank();
        Ok((rank, runtime.rank_info[rank].display_name(rank), runtime.dumper.job()))
    })?;
    timeline::start(folder, rank, &title, &job)
}

/// Ends the timeline of this rank. Nothing happens when there is none.
///
/// # Errors
/// [`Error::State`] in a forked child, which has the file of its parent.
pub fn stop_timeline() -> Result<()> {
    check_fork()?;
    timeline::stop();
    Ok(())
}

/// The numbers of all teams, as a JSON object.
///
/// # Errors
/// As for [`config`].
pub fn stats() -> Result<serde_json::Value> {
    started(|Runtime { teams, topology, .. }| {
        let teams: serde_json::Map<String, serde_json::Value> =
            teams.iter().map(|(id, team)| (id.to_string(), team.stats())).collect();
        Ok(serde_json::json!({"rank": topology.rank(), "size": topology.size(), "teams": teams}))
    })
}

/// What there is to tell of this process ([`crate::describe`]).
#[derive(Debug, Clone)]
pub struct ProcessInfo {
    /// `not_started`, `started` or `finalized`.
    pub state: &'static str,
    /// The settings, while started.
    pub config: Option<Config>,
    /// Where the ranks are, once it was started.
    pub topology: Option<Arc<Topology>>,
    /// Every rank's place, while started.
    pub rank_info: Arc<[RankInfo]>,
    /// What was measured of the network between the hosts, while started, where there are several.
    pub network: Option<NetworkModel>,
    /// The teams, by number, while started, and what is known of their GPUs.
    pub teams: Vec<(CallConfig, Option<serde_json::Value>)>,
}

/// What there is to tell of this process, in every state.
///
/// # Errors
/// [`Error::State`] in a forked child.
pub fn overview() -> Result<ProcessInfo> {
    read(|state| {
        let (places, teams) = (Arc::new([]), Vec::new());
        let mut told =
            ProcessInfo { state: "not_started", config: None, topology: None, rank_info: places, network: None, teams };
        match state {
            RuntimeState::NotStarted => {}
            RuntimeState::Finalized(topology) => {
                (told.state, told.topology) = ("finalized", Some(Arc::clone(topology)))
            }
            RuntimeState::Started(runtime) => {
                told.network = runtime.network;
                told.state = "started";
                told.config = Some(runtime.config.clone());
                told.topology = Some(Arc::clone(&runtime.topology));
                told.rank_info = Arc::clone(&runtime.rank_info);
                told.teams =
                    runtime.teams.values().map(|team| (team.group().call_config(), team.group().gpus())).collect();
            }
        }
        Ok(told)
    })
}
