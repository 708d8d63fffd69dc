//! Paths for calls on device memory, and the settings that choose one. Pure.

use serde::{Deserialize, Serialize};

use crate::error::{Error, Result};

/// Whether the stream or the host waits for the other ranks.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum SyncMode {
    /// The stream waits for flags in host memory.
    Stream,
    /// The host waits, because the driver lacks stream memory operations.
    Host,
}

/// A data path.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum Path {
    /// A single rank: no communication.
    SingleRank,
    /// NCCL between all ranks.
    Nccl,
    /// GPU IPC between the ranks of a host.
    Ipc(SyncMode),
    /// GPU IPC within each host, host memory between hosts.
    IpcStaged(SyncMode),
    /// Through host memory.
    Staged,
}

impl Path {
    /// The name in `DL_COMM_GPU_PATH` and `topology()`.
    pub fn name(self) -> &'static str {
        match self {
            Path::SingleRank => "single_rank",
            Path::Nccl => "nccl",
            Path::Ipc(_) => "ipc",
            Path::IpcStaged(_) => "ipc+staged",
            Path::Staged => "staged",
        }
    }

    /// Whether streams or the host wait, for paths with GPU IPC.
    pub fn sync(self) -> Option<SyncMode> {
        match self {
            Path::Ipc(sync) | Path::IpcStaged(sync) => Some(sync),
            Path::SingleRank | Path::Nccl | Path::Staged => None,
        }
    }
}

/// The value of `DL_COMM_GPU_PATH`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PathSetting {
    /// The fastest available path.
    Auto,
    /// NCCL, or an error.
    Nccl,
    /// GPU IPC within each host, or an error.
    Ipc,
    /// Through host memory.
    Staged,
}

impl PathSetting {
    /// Parses a setting.
    ///
    /// # Errors
    /// [`Error::Invalid`]
    pub fn parse(text: &str) -> Result<PathSetting> {
        PathSetting::ALL.into_iter().find(|setting| setting.name() == text).ok_or_else(|| {
            Error::Invalid(format!("'{text}' is no path for GPUs; these are auto, nccl, ipc and staged"))
        })
    }

    pub(super) const ALL: [PathSetting; 4] =
        [PathSetting::Auto, PathSetting::Nccl, PathSetting::Ipc, PathSetting::Staged];

    /// The name of the setting.
    pub fn name(self) -> &'static str {
        match self {
            PathSetting::Auto => "auto",
            PathSetting::Nccl => "nccl",
            PathSetting::Ipc => "ipc",
            PathSetting::Staged => "staged",
        }
    }
}

/// Settings for calls on device memory, from the environment.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DeviceSettings {
    /// `DL_COMM_GPU_PATH`.
    pub path: PathSetting,
    /// `DL_COMM_PIPELINE_CHUNK_KB`, in bytes: the maximum size of a chunk between host and GPU. A group makes it a
    /// multiple of [`crate::wire_layout::ALIGN`], and limits it to the size of a slot if it has several hosts.
    pub chunk: usize,
    /// `DL_COMM_NUM_CUDA_STREAMS`: a thread's streams for each direction.
    pub streams: usize,
}

impl Default for DeviceSettings {
    fn default() -> DeviceSettings {
        DeviceSettings { path: PathSetting::Auto, chunk: 2 << 20, streams: 1 }
    }
}
