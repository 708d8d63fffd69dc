//! Collectives on two levels: shared memory within a host, messages between hosts.
//!
//! Each collective is a `Collective`: it defines how a rank packs its slot and how a shard reduces its slice.
//! [`Channel`] runs any of them. Algorithms do not depend on a transport.
//!
//! Within a host: reduce-scatter and all-gather by slices of shared memory, each owned by one rank. Between hosts each
//! shard reduces its slice with an algorithm for its length and the number of hosts (`inter_host`). Those for long
//! slices transfer 2 (n - 1) / n of the slice, the minimum (Patarasuk and Yuan, 2009).
//! The order of addition is fixed: the ranks of a host in order, then the hosts in the order of a tree.

mod allreduce;
mod barrier;
mod broadcast;
mod call;
mod channel;
pub mod device;
mod inter_host;
pub mod matching;
mod mismatch;
mod operations;
mod phases;
mod reconcile;
mod small_message;
mod value_allgather;
mod zero_copy;

pub use call::{Call, CallConfig, Op};
pub use channel::Channel;
pub(crate) use inter_host::InterHost;
pub use inter_host::{Algorithm, AlgorithmSetting};
pub use mismatch::MismatchEntry;
pub use small_message::PostedCall;
