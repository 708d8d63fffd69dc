//! Introspection of this process: dumps, timelines, statistics, settings.

use std::path::PathBuf;
use std::sync::{Arc, Weak};

use super::state::{Runtime, RuntimeState, check_fork, read, started};
use crate::collective::CallConfig;
use crate::config::Config;
use crate::error::Result;
use crate::timeline;
use crate::topology::Topology;
use crate::transport::NetworkModel;
use crate::transport::bootstrap::Exchanges;
use crate::transport::rank_info::RankInfo;

/// Writes this rank's last calls to a file in `folder`, by default in `DL_COMM_DUMP_DIR`, and returns the path.
///
/// # Errors
/// [`crate::error::Error::State`] before [`start`](super::start) and after [`finalize`](super::finalize);
/// [`crate::error::Error::System`].
pub fn dump(folder: Option<&str>) -> Result<PathBuf> {
    let dumper = started(|runtime| Ok(Arc::clone(&runtime.dumper)))?;
    dumper.write("requested", folder)
}

/// Starts recording the timeline of this rank in `folder`.
///
/// # Errors
/// As for [`dump`]; [`crate::error::Error::State`] if a timeline is already being recorded.
pub fn start_timeline(folder: &str) -> Result<()> {
    let (rank, title, job) = started(|runtime| {
        let rank = runtime.topology.rank();
        Ok((rank, runtime.rank_info[rank].display_name(rank), runtime.dumper.job()))
    })?;
    timeline::start(folder, rank, &title, &job)
}

/// Stops recording the timeline of this rank, if there is one.
///
/// # Errors
/// [`crate::error::Error::State`] in a forked child: the file belongs to its parent.
pub fn stop_timeline() -> Result<()> {
    check_fork()?;
    timeline::stop();
    Ok(())
}

/// The statistics of all teams and other groups, as a JSON object.
///
/// # Errors
/// As for [`dump`].
pub fn stats() -> Result<serde_json::Value> {
    started(|Runtime { teams, groups, topology, .. }| {
        let teams: serde_json::Map<String, serde_json::Value> =
            teams.iter().map(|(id, team)| (id.to_string(), team.stats())).collect();
        let groups: Vec<serde_json::Value> =
            groups.values().filter_map(Weak::upgrade).map(|group| group.described_stats()).collect();
        Ok(serde_json::json!({"rank": topology.rank(), "size": topology.size(), "teams": teams, "groups": groups}))
    })
}

/// The state of this process, for [`crate::process_info`].
#[derive(Debug, Clone, Default)]
pub struct ProcessInfo {
    /// `not_started`, `started` or `finalized`.
    pub state: &'static str,
    /// The settings, if started.
    pub config: Option<Config>,
    /// The topology, once started.
    pub topology: Option<Arc<Topology>>,
    /// By rank, if started.
    pub rank_info: Arc<[RankInfo]>,
    /// The measured network between the hosts, if started and there are several.
    pub network: Option<NetworkModel>,
    /// What the exchanges among all ranks have cost, if started.
    pub exchanges: Exchanges,
    /// The teams by number, if started, with the JSON of their GPU paths.
    pub teams: Vec<(CallConfig, Option<serde_json::Value>)>,
}

/// The state of this process.
///
/// # Errors
/// [`crate::error::Error::State`] in a forked child.
pub fn overview() -> Result<ProcessInfo> {
    read(|state| {
        Ok(match state {
            RuntimeState::NotStarted => ProcessInfo { state: "not_started", ..ProcessInfo::default() },
            RuntimeState::Finalized { topology, .. } => {
                ProcessInfo { state: "finalized", topology: Some(Arc::clone(topology)), ..ProcessInfo::default() }
            }
            RuntimeState::Started(runtime) => ProcessInfo {
                state: "started",
                config: Some(runtime.config.clone()),
                topology: Some(Arc::clone(&runtime.topology)),
                rank_info: Arc::clone(&runtime.rank_info),
                network: runtime.network,
                exchanges: runtime.job.exchanges(),
                teams: runtime
                    .teams
                    .values()
                    .map(|team| (team.group().call_config().clone(), team.group().gpus()))
                    .collect(),
            },
        })
    })
}
