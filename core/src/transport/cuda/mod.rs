//! CUDA: contexts, streams, events, IPC memory, NCCL and kernels. No other module names CUDA.
//!
//! The first call on device memory loads the driver, NVRTC and NCCL. Building and importing need no CUDA; a missing
//! library is an error that names it.
//! Nothing here synchronizes a device. Events on streams order the work, and so do 32-bit flags in host memory that
//! streams write and wait for.
//! Functions fail with [`Error::System`](crate::error::Error::System), if they do not say otherwise.
//! Thread rule: as each type documents; any thread may use the driver's handles.

mod cache;
mod compiler;
mod context;
mod driver;
mod ipc;
mod kernel_table;
mod kernels;
mod launch_order;
mod nccl;
mod peer_imports;
mod pinned;
mod stream;

pub use compiler::compile_into as compile_kernels_into;
pub use context::{Context, ContextGuard, TAKE_TURNS, has_one_queue};
pub use driver::{Address, Handle, count};
pub use ipc::{ExportUpdates, ExportedAllocation, IpcExports, ReportedExports};
pub use kernel_table::{KernelSet, has_partial_kernel, kernel_set, kernel_type};
pub use kernels::{BlockRange, KernelArgs, Kernels, Launch};
pub use launch_order::{LaunchOrder, Place};
pub use nccl::{
    Communicator, NcclBuffers, NcclOperation, RedOp, UniqueId, reduces as nccl_reduces, version as nccl_version,
};
pub use peer_imports::PeerImports;
pub use pinned::{DeviceBuffer, PinnedHostBuffer, alloc, device_of_pointer, free, is_loaded};
pub use stream::{CallerStream, Event, RawStream, Stream, order_streams};
