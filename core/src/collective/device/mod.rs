//! Calls on device memory: the same groups and matching as on host memory, with other data paths.
//!
//! A call starts with a round without data, in which the ranks compare signatures. Then it takes the group's path, on
//! which the ranks agree in the first such call:
//! - every rank has its own GPU, and NCCL is available: NCCL (`nccl`), for all collectives;
//! - ranks on one host: GPU IPC (`ipc`);
//! - ranks on several hosts: GPU IPC within a host, slices through host memory between hosts (`ipc_multi_host`);
//! - otherwise through host memory, in chunks, by the collectives of the host (`staged`).
//!
//! What a path lacks goes through host memory on all ranks: allreduces and broadcasts in chunks, the others as a whole
//! (`host_copy`). NCCL and GPU IPC on one host have every collective. This follows from the call, so the ranks need not agree on it.
//! Functions fail with the errors of the driver, of NCCL and of the transports, and when their wait context ends. An error
//! in a call leaves the ranks out of sync.
//! Paths that bypass the host enqueue work and do not block: the call ends once the caller's stream waits for the
//! result. `ipc_multi_host` and `staged` wait for the GPU in each chunk.
//! Enqueued work of a call that another rank leaves alone, or that is late, is released ([`release`]): the streams go on,
//! with NaN in the outputs.
//! Thread rule: the leader of the group uses [`DevicePath`]; a [`StagingPipeline`] belongs to one thread.

mod batch;
mod device_path;
mod host_copy;
mod ipc;
mod ipc_blocks;
mod ipc_flags;
mod ipc_multi_host;
mod ipc_peers;
mod messages;
mod nccl;
mod nccl_steps;
mod path;
mod release;
mod settings;
mod shm_allgather;
mod staged;
mod streams;

pub use device_path::DevicePath;
pub use host_copy::{HostCopies, HostCopy};
pub use messages::DeviceMessages;
pub use nccl::NcclPath;
pub use release::StreamRelease;
pub use settings::{DeviceSettings, PathSetting};
pub use staged::StagingPipeline;
pub(crate) use streams::TEARDOWN_TIMEOUT;
pub use streams::{DeviceResult, poll_until, producer, unrecoverable, wait_event};
