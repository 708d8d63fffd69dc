//! Calls on device memory: the same team, the same matching, other ways for the data.
//!
//! A call begins as every other does, with a step in which the ranks see each other's signatures; nothing of its data is in
//! it. Then it takes the team's path ([`path`]), on which the ranks agree at the first such call:
//! - each rank its own GPU and NCCL there: NCCL ([`ring`]);
//! - the ranks of one host, by memory that they see in each other ([`direct`]);
//! - the ranks of several hosts the same way within a host, and in slices through host memory between hosts ([`across`]);
//! - else through host memory, in chunks, by the averages of the host ([`staged`]).
//!
//! Where nothing goes through the host, it enqueues and does not wait: a call ends for its caller when the caller's stream will
//! see the result. [`across`] and [`staged`] wait for the GPU to come to each chunk.
//! Thread rule: [`DevicePath`] is the lead's; a [`StagingPipeline`] is one thread's.

mod batch;
mod device_path;
mod ipc;
mod ipc_flags;
mod ipc_multi_host;
mod ipc_peers;
mod nccl;
mod path;
mod poll;
mod settings;
mod shm_allgather;
mod staged;
mod streams;

pub use device_path::DevicePath;
pub(crate) use poll::TEARDOWN_TIMEOUT;
pub use settings::{DeviceSettings, PathSetting};
pub use staged::StagingPipeline;
pub use streams::DeviceResult;
