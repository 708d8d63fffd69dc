//! The choice of a path for calls on device memory, from the capabilities of all ranks. Pure except
//! [`GpuCapabilities::gather`].

use std::collections::BTreeMap;
use std::sync::Arc;

use serde::{Deserialize, Serialize};

use super::ipc_flags::probe;
use super::settings::{Path, PathSetting, SyncMode};
use crate::error::{Error, Result};
use crate::topology::Topology;
use crate::transport::gpu::{Context, nccl_version};

/// NCCL's own variable (since 2.30): with 1, ranks may share a GPU.
const NCCL_SHARES_GPU: &str = "NCCL_MULTI_RANK_GPU_ENABLE";

/// A rank's GPU and the paths that it supports.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct GpuCapabilities {
    /// The same for all processes that use the GPU.
    uuid: String,
    /// NCCL's version, or why it is not available; it needs the kernels, which mark what a lost call leaves.
    nccl: std::result::Result<i32, String>,
    /// Whether NCCL may have several ranks on a GPU.
    nccl_shares_gpu: bool,
    /// Whether kernels of several processes run at a time.
    mps: bool,
    /// Whether streams or the host wait, or why GPU IPC is not available.
    ipc: std::result::Result<SyncMode, String>,
}

impl GpuCapabilities {
    /// The capabilities of this process.
    pub fn gather(context: &Arc<Context>) -> GpuCapabilities {
        let short_text = |error: Error| truncated(error.detail());
        GpuCapabilities {
            uuid: context.uuid.clone(),
            nccl: nccl_version().and_then(|version| context.kernels().map(|_| version)).map_err(short_text),
            nccl_shares_gpu: std::env::var(NCCL_SHARES_GPU).is_ok_and(|value| value.trim() == "1"),
            mps: mps(),
            ipc: probe(context).map_err(short_text),
        }
    }

    /// Records that NCCL failed on this rank.
    pub fn lacks_nccl(&mut self, reason: &str) {
        self.nccl = Err(truncated(reason));
    }
}

/// Whether NVIDIA's Multi-Process Service runs. With it, kernels of ranks that share a GPU overlap instead of taking
/// time slices.
pub(super) fn mps() -> bool {
    let folder = std::env::var_os("CUDA_MPS_PIPE_DIRECTORY").unwrap_or_else(|| "/tmp/nvidia-mps".into());
    std::path::Path::new(&folder).join("control").exists()
}

/// Limits the text to 300 characters, because it is part of an all-gather: a compiler's log would not fit.
fn truncated(short_text: &str) -> String {
    short_text.chars().take(300).collect()
}

/// The common choice of all ranks.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct GpuPathChoice {
    pub path: Path,
    /// Why no faster path was chosen; empty if this is the fastest.
    pub reason: String,
    /// Whether no two ranks share a GPU.
    pub own_gpus: bool,
    /// Whether ranks share a GPU whose kernels take turns in time slices.
    pub takes_turns: bool,
    /// Why the requested path is not available.
    unavailable: Option<String>,
}

impl GpuPathChoice {
    /// # Errors
    /// [`Error::Invalid`] when the requested path is not available.
    pub fn checked(self) -> Result<GpuPathChoice> {
        match self.unavailable {
            Some(reason) => Err(Error::Invalid(reason)),
            None => Ok(self),
        }
    }
}

/// The path for these capabilities; the same on every rank.
pub(super) fn choose_path(capabilities: &[GpuCapabilities], wanted: PathSetting, topology: &Topology) -> GpuPathChoice {
    let own_gpus = shared_gpu(capabilities).is_none();
    let takes_turns = !own_gpus && !capabilities.iter().all(|rank| rank.mps);
    let choice = |path, reason: &str| {
        let reason = reason.to_owned();
        GpuPathChoice { path, reason, own_gpus, takes_turns, unavailable: None }
    };
    if capabilities.len() == 1 {
        return choice(Path::SingleRank, "");
    }
    let (nccl, ipc) = (nccl_blocker(capabilities, wanted), ipc_blocker(capabilities, topology));
    let refuse = |name: &str, reason: &str| GpuPathChoice {
        unavailable: Some(format!("DL_COMM_GPU_PATH is {name}, but {reason}")),
        ..choice(Path::Staged, "")
    };
    let kernels = |wait| if topology.hosts() > 1 { Path::IpcStaged(wait) } else { Path::Ipc(wait) };
    match (wanted, nccl, ipc) {
        (PathSetting::Staged, _, _) => choice(Path::Staged, "DL_COMM_GPU_PATH asks for it"),
        (PathSetting::Nccl, Some(reason), _) => refuse("nccl", &reason),
        (PathSetting::Nccl | PathSetting::Auto, None, _) => choice(Path::Nccl, ""),
        (PathSetting::Ipc, _, Err(reason)) => refuse("ipc", &reason),
        (PathSetting::Ipc, _, Ok(wait)) => choice(kernels(wait), "DL_COMM_GPU_PATH asks for it"),
        (PathSetting::Auto, Some(reason), Ok(wait)) => choice(kernels(wait), &format!("not nccl: {reason}")),
        (PathSetting::Auto, Some(no_nccl), Err(no_ipc)) => {
            choice(Path::Staged, &format!("not nccl: {no_nccl}; not ipc: {no_ipc}"))
        }
    }
}

/// Two ranks that share a GPU, if there are any.
fn shared_gpu(capabilities: &[GpuCapabilities]) -> Option<(usize, usize)> {
    let mut owners: BTreeMap<&str, usize> = BTreeMap::new();
    capabilities
        .iter()
        .enumerate()
        .find_map(|(rank, rank_capabilities)| owners.insert(&rank_capabilities.uuid, rank).map(|one| (one, rank)))
}

/// Why the group cannot use NCCL, if it cannot. NCCL on a shared GPU is slow without MPS, so that it must be requested.
fn nccl_blocker(capabilities: &[GpuCapabilities], wanted: PathSetting) -> Option<String> {
    let may_share = wanted == PathSetting::Nccl && capabilities.iter().all(|rank| rank.nccl_shares_gpu);
    if let Some((one, other)) = shared_gpu(capabilities).filter(|_| !may_share) {
        return Some(format!("ranks {one} and {other} share a GPU"));
    }
    for (rank, rank_capabilities) in capabilities.iter().enumerate() {
        match (&rank_capabilities.nccl, &capabilities[0].nccl) {
            (Err(reason), _) => return Some(format!("rank {rank}: {reason}")),
            (Ok(version), Ok(first)) if version != first => {
                return Some(format!("rank {rank} has NCCL {version} and rank 0 has {first}"));
            }
            _ => {}
        }
    }
    None
}

/// Whether streams or the host wait with GPU IPC, or why it is not available.
fn ipc_blocker(capabilities: &[GpuCapabilities], topology: &Topology) -> std::result::Result<SyncMode, String> {
    if topology.hosts() > 1 && topology.hosts() == topology.size() {
        return Err("every rank is on a host of its own".into());
    }
    common_sync(capabilities.iter().map(|rank_capabilities| rank_capabilities.ipc.clone()))
}

/// Who waits on all ranks: the host, if it must on one. The first reason if a rank cannot use GPU IPC.
pub(super) fn common_sync(
    ranks: impl IntoIterator<Item = std::result::Result<SyncMode, String>>,
) -> std::result::Result<SyncMode, String> {
    ranks.into_iter().enumerate().try_fold(SyncMode::Stream, |all, (rank, sync)| match sync {
        Ok(SyncMode::Stream) => Ok(all),
        Ok(SyncMode::Host) => Ok(SyncMode::Host),
        Err(reason) => Err(format!("rank {rank}: {reason}")),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn gpu(uuid: &str) -> GpuCapabilities {
        let (nccl, ipc) = (Ok(22809), Ok(SyncMode::Stream));
        GpuCapabilities { uuid: uuid.into(), nccl, nccl_shares_gpu: false, mps: false, ipc }
    }

    fn choose(capabilities: &[GpuCapabilities], hosts: &[usize], wanted: PathSetting) -> GpuPathChoice {
        let topology = Topology::new(0, hosts);
        choose_path(capabilities, wanted, &topology)
    }

    #[test]
    fn own_gpus_select_nccl_and_shared_ones_ipc() {
        let separate = [gpu("a"), gpu("b")];
        assert_eq!(choose(&separate, &[0, 0], PathSetting::Auto).path, Path::Nccl);
        assert_eq!(choose(&separate, &[0, 1], PathSetting::Auto).path, Path::Nccl);
        assert_eq!(choose(&separate, &[0, 0], PathSetting::Ipc).path, Path::Ipc(SyncMode::Stream));
        assert_eq!(choose(&separate, &[0, 0], PathSetting::Staged).path, Path::Staged);
        let shared = choose(&[gpu("a"), gpu("a")], &[0, 0], PathSetting::Auto);
        assert_eq!(shared.path, Path::Ipc(SyncMode::Stream));
        assert!(shared.reason.contains("ranks 0 and 1 share a GPU"), "{}", shared.reason);
        assert_eq!(choose(&[gpu("a")], &[0], PathSetting::Nccl).path, Path::SingleRank);
    }

    #[test]
    fn ranks_take_turns_on_a_gpu_without_mps() {
        let [with, without] = [true, false].map(|mps| GpuCapabilities { mps, ..gpu("a") });
        assert!(choose(&[with.clone(), without.clone()], &[0, 0], PathSetting::Auto).takes_turns);
        assert!(!choose(&[with.clone(), with], &[0, 0], PathSetting::Auto).takes_turns);
        assert!(!choose(&[without, gpu("b")], &[0, 0], PathSetting::Auto).takes_turns);
    }

    #[test]
    fn nccl_shares_a_gpu_if_all_ranks_allow_it_and_it_is_requested() {
        let allowing = GpuCapabilities { nccl_shares_gpu: true, ..gpu("a") };
        let all = [allowing.clone(), allowing.clone()];
        assert_eq!(choose(&all, &[0, 0], PathSetting::Nccl).path, Path::Nccl);
        assert_eq!(choose(&all, &[0, 0], PathSetting::Auto).path, Path::Ipc(SyncMode::Stream));
        assert!(choose(&[allowing, gpu("a")], &[0, 0], PathSetting::Nccl).checked().is_err());
    }

    #[test]
    fn several_hosts_with_several_ranks_select_ipc_staged() {
        let shared = [gpu("a"), gpu("a"), gpu("b")];
        assert_eq!(choose(&shared, &[0, 0, 1], PathSetting::Auto).path, Path::IpcStaged(SyncMode::Stream));
        assert_eq!(choose(&shared, &[0, 0, 1], PathSetting::Ipc).path, Path::IpcStaged(SyncMode::Stream));
        assert_eq!(choose(&shared, &[0, 0, 1], PathSetting::Staged).path, Path::Staged);
        let host = GpuCapabilities { ipc: Ok(SyncMode::Host), ..gpu("b") };
        assert_eq!(
            choose(&[gpu("a"), gpu("a"), host], &[0, 0, 1], PathSetting::Auto).path,
            Path::IpcStaged(SyncMode::Host)
        );
        let alone = choose(&[gpu("a"), gpu("b")], &[0, 1], PathSetting::Auto);
        assert_eq!(alone.path, Path::Nccl);
    }

    #[test]
    fn path_unsupported_on_one_rank_is_not_chosen() {
        let lacking = GpuCapabilities { nccl: Err("no library".into()), ..gpu("b") };
        let choice = choose(&[gpu("a"), lacking.clone()], &[0, 0], PathSetting::Auto);
        assert_eq!(choice.path, Path::Ipc(SyncMode::Stream));
        assert!(choice.reason.contains("rank 1: no library"), "{}", choice.reason);
        assert_eq!(choose(&[gpu("a"), lacking.clone()], &[0, 1], PathSetting::Auto).path, Path::Staged);
        let older = GpuCapabilities { nccl: Ok(22000), ..gpu("b") };
        assert_eq!(choose(&[gpu("a"), older], &[0, 0], PathSetting::Auto).path, Path::Ipc(SyncMode::Stream));
        let host = GpuCapabilities { ipc: Ok(SyncMode::Host), ..gpu("a") };
        assert_eq!(choose(&[gpu("a"), host], &[0, 0], PathSetting::Auto).path, Path::Ipc(SyncMode::Host));
        let blind = GpuCapabilities { ipc: Err("a container".into()), ..gpu("a") };
        let staged = choose(&[gpu("a"), blind], &[0, 0], PathSetting::Auto);
        assert_eq!(staged.path, Path::Staged);
        assert!(staged.reason.contains("not ipc: rank 1: a container"), "{}", staged.reason);
    }

    #[test]
    fn unavailable_path_settings_are_errors_with_the_reason() {
        let shared = [gpu("a"), gpu("a")];
        let error = choose(&shared, &[0, 0], PathSetting::Nccl).checked().unwrap_err();
        assert!(error.to_string().contains("DL_COMM_GPU_PATH is nccl, but ranks 0 and 1 share a GPU"), "{error}");
        let error = choose(&shared, &[0, 1], PathSetting::Ipc).checked().unwrap_err();
        assert!(error.to_string().contains("a host of its own"), "{error}");
        assert!(PathSetting::parse("fast").is_err());
        assert!(PathSetting::ALL.into_iter().all(|wanted| PathSetting::parse(wanted.name()) == Ok(wanted)));
    }
}
