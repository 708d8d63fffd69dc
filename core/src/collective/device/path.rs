//! Which way the data of calls on device memory goes: what every rank tells of its GPU, and what follows. Pure but for the
//! gathering of a rank's own facts.

use std::collections::BTreeMap;
use std::sync::Arc;

use serde::{Deserialize, Serialize};

use super::ipc_flags::probe;
use super::settings::{Path, PathSetting, SyncMode};
use crate::error::{Error, Result};
use crate::topology::Topology;
use crate::transport::gpu::{Context, nccl_version};

/// What a rank tells of its GPU.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct GpuCapabilities {
    /// The same for all processes that use the GPU.
    uuid: String,
    /// The version of NCCL, or why there is none.
    nccl: std::result::Result<i32, String>,
    /// Who can wait, or why no other process can see this one's memory.
    ipc: std::result::Result<SyncMode, String>,
}

impl GpuCapabilities {
    /// Those of this process.
    pub fn gather(context: &Arc<Context>) -> GpuCapabilities {
        let words = |error: Error| shortened(error.detail());
        GpuCapabilities {
            uuid: context.uuid(),
            nccl: nccl_version().map_err(words),
            ipc: probe(context).map_err(words),
        }
    }

    /// NCCL has refused on this rank.
    pub fn lacks_nccl(&mut self, why: &str) {
        self.nccl = Err(shortened(why));
    }
}

/// All that a rank tells has to fit a text of a round; the log of a compiler does not.
fn shortened(words: &str) -> String {
    words.chars().take(300).collect()
}

/// What the ranks do.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct PathChoice {
    pub path: Path,
    /// Why it is no better one; empty when there is none.
    pub reason: String,
    /// Whether no two ranks share a GPU.
    pub own_gpus: bool,
    /// Why the path that was asked for cannot be had.
    unavailable: Option<String>,
}

impl PathChoice {
    /// # Errors
    /// [`Error::Invalid`] when the requested path is not available.
    pub fn checked(self) -> Result<PathChoice> {
        match self.unavailable {
            Some(reason) => Err(Error::Invalid(reason)),
            None => Ok(self),
        }
    }
}

/// What follows from the facts of all ranks: the same on every one.
pub(super) fn choose_path(facts: &[GpuCapabilities], wanted: PathSetting, topology: &Topology) -> PathChoice {
    let own_gpus = sharers(facts).is_none();
    let decided = |path, why: &str| PathChoice { path, reason: why.to_owned(), own_gpus, unavailable: None };
    if facts.len() == 1 {
        return decided(Path::SingleRank, "");
    }
    let (nccl, ipc) = (nccl_blocker(facts), ipc_blocker(facts, topology));
    let refuse = |name: &str, why: &str| PathChoice {
        unavailable: Some(format!("DL_COMM_GPU_PATH is {name}, but {why}")),
        ..decided(Path::Staged, "")
    };
    let kernels = |wait| if topology.hosts() > 1 { Path::IpcStaged(wait) } else { Path::Ipc(wait) };
    match (wanted, nccl, ipc) {
        (PathSetting::Staged, _, _) => decided(Path::Staged, "DL_COMM_GPU_PATH asks for it"),
        (PathSetting::Nccl, Some(why), _) => refuse("nccl", &why),
        (PathSetting::Nccl | PathSetting::Auto, None, _) => decided(Path::Nccl, ""),
        (PathSetting::Ipc, _, Err(why)) => refuse("ipc", &why),
        (PathSetting::Ipc, _, Ok(wait)) => decided(kernels(wait), "DL_COMM_GPU_PATH asks for it"),
        (PathSetting::Auto, Some(why), Ok(wait)) => decided(kernels(wait), &format!("not nccl: {why}")),
        (PathSetting::Auto, Some(no_nccl), Err(no_ipc)) => {
            decided(Path::Staged, &format!("not nccl: {no_nccl}; not ipc: {no_ipc}"))
        }
    }
}

/// Two ranks that share a GPU, if there are any.
fn sharers(facts: &[GpuCapabilities]) -> Option<(usize, usize)> {
    let mut owners: BTreeMap<&str, usize> = BTreeMap::new();
    facts.iter().enumerate().find_map(|(rank, fact)| owners.insert(&fact.uuid, rank).map(|one| (one, rank)))
}

/// Why NCCL cannot carry the team, if it cannot.
fn nccl_blocker(facts: &[GpuCapabilities]) -> Option<String> {
    if let Some((one, other)) = sharers(facts) {
        return Some(format!("ranks {one} and {other} share a GPU"));
    }
    for (rank, fact) in facts.iter().enumerate() {
        match (&fact.nccl, &facts[0].nccl) {
            (Err(why), _) => return Some(format!("rank {rank}: {why}")),
            (Ok(version), Ok(first)) if version != first => {
                return Some(format!("rank {rank} has NCCL {version} and rank 0 has {first}"));
            }
            _ => {}
        }
    }
    None
}

/// Who waits where the ranks see each other's memory, or why they do not.
fn ipc_blocker(facts: &[GpuCapabilities], topology: &Topology) -> std::result::Result<SyncMode, String> {
    if topology.hosts() > 1 && topology.hosts() == topology.size() {
        return Err("every rank is on a host of its own".into());
    }
    let mut all = SyncMode::Stream;
    for (rank, fact) in facts.iter().enumerate() {
        match &fact.ipc {
            Ok(SyncMode::Stream) => {}
            Ok(SyncMode::Host) => all = SyncMode::Host,
            Err(why) => return Err(format!("rank {rank}: {why}")),
        }
    }
    Ok(all)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn fact(uuid: &str) -> GpuCapabilities {
        GpuCapabilities { uuid: uuid.into(), nccl: Ok(22809), ipc: Ok(SyncMode::Stream) }
    }

    fn decision(facts: &[GpuCapabilities], hosts: &[usize], wanted: PathSetting) -> PathChoice {
        let topology = Topology::new(0, hosts);
        choose_path(facts, wanted, &topology)
    }

    #[test]
    fn a_gpu_for_each_rank_is_for_nccl_and_a_shared_one_for_ipc() {
        let own = [fact("a"), fact("b")];
        assert_eq!(decision(&own, &[0, 0], PathSetting::Auto).path, Path::Nccl);
        assert_eq!(decision(&own, &[0, 1], PathSetting::Auto).path, Path::Nccl);
        assert_eq!(decision(&own, &[0, 0], PathSetting::Ipc).path, Path::Ipc(SyncMode::Stream));
        assert_eq!(decision(&own, &[0, 0], PathSetting::Staged).path, Path::Staged);
        let shared = decision(&[fact("a"), fact("a")], &[0, 0], PathSetting::Auto);
        assert_eq!(shared.path, Path::Ipc(SyncMode::Stream));
        assert!(shared.reason.contains("ranks 0 and 1 share a GPU"), "{}", shared.reason);
        assert_eq!(decision(&[fact("a")], &[0], PathSetting::Nccl).path, Path::SingleRank);
    }

    #[test]
    fn between_hosts_go_slices_where_hosts_have_several_ranks() {
        let shared = [fact("a"), fact("a"), fact("b")];
        assert_eq!(decision(&shared, &[0, 0, 1], PathSetting::Auto).path, Path::IpcStaged(SyncMode::Stream));
        assert_eq!(decision(&shared, &[0, 0, 1], PathSetting::Ipc).path, Path::IpcStaged(SyncMode::Stream));
        assert_eq!(decision(&shared, &[0, 0, 1], PathSetting::Staged).path, Path::Staged);
        let host = GpuCapabilities { ipc: Ok(SyncMode::Host), ..fact("b") };
        assert_eq!(
            decision(&[fact("a"), fact("a"), host], &[0, 0, 1], PathSetting::Auto).path,
            Path::IpcStaged(SyncMode::Host)
        );
        let alone = decision(&[fact("a"), fact("b")], &[0, 1], PathSetting::Auto);
        assert_eq!(alone.path, Path::Nccl);
    }

    #[test]
    fn what_one_rank_lacks_nobody_uses() {
        let lacking = GpuCapabilities { nccl: Err("no library".into()), ..fact("b") };
        let decided = decision(&[fact("a"), lacking.clone()], &[0, 0], PathSetting::Auto);
        assert_eq!(decided.path, Path::Ipc(SyncMode::Stream));
        assert!(decided.reason.contains("rank 1: no library"), "{}", decided.reason);
        assert_eq!(decision(&[fact("a"), lacking.clone()], &[0, 1], PathSetting::Auto).path, Path::Staged);
        let older = GpuCapabilities { nccl: Ok(22000), ..fact("b") };
        assert_eq!(decision(&[fact("a"), older], &[0, 0], PathSetting::Auto).path, Path::Ipc(SyncMode::Stream));
        let host = GpuCapabilities { ipc: Ok(SyncMode::Host), ..fact("a") };
        assert_eq!(decision(&[fact("a"), host], &[0, 0], PathSetting::Auto).path, Path::Ipc(SyncMode::Host));
        let blind = GpuCapabilities { ipc: Err("a container".into()), ..fact("a") };
        let staged = decision(&[fact("a"), blind], &[0, 0], PathSetting::Auto);
        assert_eq!(staged.path, Path::Staged);
        assert!(staged.reason.contains("not ipc: rank 1: a container"), "{}", staged.reason);
    }

    #[test]
    fn what_was_asked_for_and_cannot_be_had_is_refused_with_the_reason() {
        let shared = [fact("a"), fact("a")];
        let error = decision(&shared, &[0, 0], PathSetting::Nccl).checked().unwrap_err();
        assert!(error.to_string().contains("DL_COMM_GPU_PATH is nccl, but ranks 0 and 1 share a GPU"), "{error}");
        let error = decision(&shared, &[0, 1], PathSetting::Ipc).checked().unwrap_err();
        assert!(error.to_string().contains("a host of its own"), "{error}");
        assert!(PathSetting::parse("fast").is_err());
        assert!(PathSetting::ALL.into_iter().all(|wanted| PathSetting::parse(wanted.name()) == Ok(wanted)));
    }
}
