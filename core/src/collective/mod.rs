//! Collectives on two levels: shared memory within a host, messages between hosts.
//!
//! A collective is a row of a table ([`Collective`]): the [`Pattern`] of its data, whether it reduces, and the role of
//! its root. [`Channel`] runs any of them. Algorithms do not depend on a transport.
//!
//! Within a host: reduce-scatter and all-gather by slices of shared memory, each owned by one rank; calls that only move
//! data are read from the slots of the senders. Between hosts the owner of a shard exchanges its slice with the owners
//! on the other hosts (`inter_host`). The algorithms for long slices transfer the minimum of bytes: for an allreduce
//! 2 (n - 1) / n of the slice (Patarasuk and Yuan, 2009).
//! The order of addition is fixed: the ranks of a host in order, then the hosts in the order of a tree.

mod algorithm;
mod blocks;
mod call;
mod call_config;
mod channel;
mod check;
mod chunk_source;
mod chunk_task;
mod common_calls;
mod counts;
mod describe;
pub mod device;
mod host_chunks;
mod in_place;
mod inter_host;
mod length;
mod lookahead;
pub mod matching;
mod mismatch;
mod operation;
mod partials;
mod parts;
mod path_agreement;
mod path_choice;
mod pending_calls;
mod plan;
mod reconcile;
pub mod selection;
mod shard;
mod small_call;
mod small_plan;
mod stand_in;
mod tensor_names;
mod transfer;
mod value_allgather;
mod wire;
mod zero_copy;

pub use algorithm::{Algorithm, AlgorithmSetting};
pub use blocks::Compartments;
pub use call::Call;
pub use call_config::CallConfig;
pub use channel::Channel;
pub use chunk_source::{ActiveCall, ChunkSource, NextChunk};
pub use counts::{Bounds, Counts};
pub(crate) use inter_host::InterHost;
pub use lookahead::Lookahead;
pub use mismatch::{MismatchEntry, list_of_ranks};
pub use operation::{Collective, Op, Pattern, Root, TABLE};
pub use plan::ChunkPlan;
pub use selection::Selection;
pub use small_call::PostedCall;
pub use small_plan::SmallPlan;
pub use tensor_names::TensorNames;
