//! The paths that calls on device memory can take, and the settings that choose one. Pure.

use serde::{Deserialize, Serialize};

use crate::error::{Error, Result};

/// Who waits for the other ranks while the data is on its way.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum SyncMode {
    /// The stream, for numbers in host memory.
    Stream,
    /// The host, where the driver has no such operation.
    Host,
}

/// A way for the data.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum Path {
    /// There is one rank.
    SingleRank,
    /// NCCL between all ranks.
    Nccl,
    /// Kernels on memory that the ranks of a host see in each other.
    Ipc(SyncMode),
    /// The same within each host, and through host memory between them.
    IpcStaged(SyncMode),
    /// Through host memory.
    Staged,
}

impl Path {
    /// As `DL_COMM_GPU_PATH` and `topology()` name it.
    pub fn name(self) -> &'static str {
        match self {
            Path::SingleRank => "single_rank",
            Path::Nccl => "nccl",
            Path::Ipc(_) => "ipc",
            Path::IpcStaged(_) => "ipc+staged",
            Path::Staged => "staged",
        }
    }

    /// Who waits, where kernels work on memory of several ranks.
    pub fn wait(self) -> Option<SyncMode> {
        match self {
            Path::Ipc(wait) | Path::IpcStaged(wait) => Some(wait),
            Path::SingleRank | Path::Nccl | Path::Staged => None,
        }
    }
}

/// What the environment asks for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PathSetting {
    /// The best there is.
    Auto,
    /// This one, or an error.
    Nccl,
    /// This one within each host, or an error.
    Ipc,
    /// This one.
    Staged,
}

impl PathSetting {
    /// The name of a path.
    ///
    /// # Errors
    /// [`Error::Invalid`]
    pub fn parse(text: &str) -> Result<PathSetting> {
        PathSetting::ALL
            .into_iter()
            .find(|wanted| wanted.name() == text)
            .ok_or_else(|| Error::Invalid(format!("DL_COMM_GPU_PATH is '{text}'; set it to auto, nccl, ipc or staged")))
    }

    pub(super) const ALL: [PathSetting; 4] =
        [PathSetting::Auto, PathSetting::Nccl, PathSetting::Ipc, PathSetting::Staged];

    /// As it is asked for.
    pub fn name(self) -> &'static str {
        match self {
            PathSetting::Auto => "auto",
            PathSetting::Nccl => "nccl",
            PathSetting::Ipc => "ipc",
            PathSetting::Staged => "staged",
        }
    }
}

/// How calls on device memory are carried, as the environment says.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DeviceSettings {
    /// `DL_COMM_GPU_PATH`.
    pub path: PathSetting,
    /// `DL_COMM_PIPELINE_CHUNK_KB`, in bytes: the most that goes between host and GPU at a time. For a team a multiple of
    /// [`crate::layout::ALIGN`], and, where it has several hosts, no more than a slot has.
    pub chunk: usize,
    /// `DL_COMM_NUM_CUDA_STREAMS`: a thread's streams for each direction.
    pub streams: usize,
}

impl Default for DeviceSettings {
    fn default() -> DeviceSettings {
        DeviceSettings { path: PathSetting::Auto, chunk: 2 << 20, streams: 1 }
    }
}
