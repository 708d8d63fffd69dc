//! The core of dl_comm: collectives on lists of tensors over the ranks of a data-parallel job.
//!
//! Layers, each using only those below it:
//! - api: [`capi`] (C), `ffi` (C++, through cxx): validate and translate;
//! - [`plugin`]: the Cray plugin's schedules, a client of [`group`];
//! - [`parameter_server`]: tensors that any rank reads and updates at any time, a client of [`group`];
//! - [`runtime`]: process-wide state (start, groups, shutdown), reported by [`process_info`] and [`dump`];
//! - [`group`]: queue, threads, matching, the life of a call and its record;
//! - [`p2p`]: send and receive;
//! - [`collective`]: one file per collective; algorithms in shared memory, between hosts and on GPUs;
//! - [`transport`]: shared memory, network, [`transport::job`], [`transport::gpu`], ranks as threads
//!   for tests;
//! - base: [`dtype`], [`buffer`], [`device`], [`wire_layout`], [`reduce`], [`stream_copy`], [`topology`], [`affinity`],
//!   [`config`], [`variables`], [`error`], [`result_memory`], [`timings`], [`timeline`], [`helper`], [`signals`], [`stacks`].
//!
//! `docs/architecture.md` follows one gradient through the layers.

#[cfg(not(target_os = "linux"))]
compile_error!("dl_comm needs Linux: futexes, pidfds and /dev/shm");

mod address_space;
pub mod affinity;
pub mod buffer;
pub mod capi;
#[cfg(any(test, feature = "in-process"))]
pub mod cases;
mod clock;
mod codec;
pub mod collective;
pub mod config;
pub mod deadline;
pub mod device;
pub mod dtype;
pub mod dump;
pub mod error;
mod exit_status;
mod ffi;
pub mod float_state;
mod folder;
mod fork;
pub mod group;
pub mod group_config;
pub mod group_key;
mod hashed_map;
pub mod helper;
mod lock;
mod log;
pub mod p2p;
pub mod pages;
pub mod parameter_server;
pub mod plugin;
pub mod process_info;
pub mod reduce;
pub mod result_memory;
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
