//! GPUs: contexts, streams and events, memory that other processes see, kernels. The only place that names CUDA.
//!
//! The driver, NVRTC and NCCL are loaded when the first call on device memory is made; nothing of CUDA is needed to build or
//! to import, and what is missing is an error that says so. Nothing here synchronises a device: order is made by events on
//! streams, and by numbers that streams write to and wait for in host memory.
//! Thread rule: as each type says; handles of the driver may be used from any thread.

mod cache;
mod context;
mod driver;
mod ipc;
mod kernels;
mod nccl;
mod peer_imports;
mod pinned;
mod stream;

pub use context::{Context, ContextGuard};
pub use driver::{Address, count};
pub use ipc::{ExportUpdates, ExportedAllocation, IpcExports, ReportedExports};
pub use kernels::{BlockRange, KernelArgs, Kernels};
pub use nccl::{Communicator, UniqueId, version as nccl_version};
pub use peer_imports::PeerImports;
pub use pinned::{DeviceBuffer, HostRegistration, PinnedHostBuffer, device_of_pointer, is_loaded};
pub use stream::{CallerStream, Event, RawStream, Stream, order_streams};
