//! The core of dl_comm: means and broadcasts of lists of tensors over the ranks of a data-parallel job.
//!
//! Layers, each using only those below it:
//! - bindings: [`capi`] (C), `ffi` (C++, through cxx); [`global`] is the process-wide state behind both, [`describe`] and
//!   [`dump`] tell of it;
//! - [`team`]: queues, threads, the life of a call;
//! - [`collective`]: average, broadcast, barrier, composed over region and cluster;
//! - [`transport`]: memory shared in a host, messages between hosts, ranks as threads for tests;
//! - ground: [`dtype`], [`buffer`], [`device`], [`plan`], [`reduce`], `blend`, [`stream_copy`], [`schedule`], [`topology`], [`affinity`],
//!   [`config`], [`error`], [`trace`] and [`timeline`] (where the time goes).
//!
//! `docs/architecture.md` follows one gradient through them.

#[cfg(not(target_os = "linux"))]
compile_error!("dl_comm needs Linux: futexes, pidfds and /dev/shm");

pub mod affinity;
pub mod buffer;
pub mod capi;
mod clock;
mod codec;
pub mod collective;
pub mod config;
pub mod device;
pub mod dtype;
pub mod dump;
pub mod error;
mod ffi;
mod folder;
mod fork;
pub mod group;
pub mod helper;
mod log;
pub mod plugin;
pub mod process_info;
pub mod reduce;
pub mod runtime;
pub mod signals;
pub mod stacks;
pub mod stream_copy;
pub mod timeline;
pub mod timings;
pub mod topology;
pub mod transport;
pub mod variables;
pub mod wire_layout;
