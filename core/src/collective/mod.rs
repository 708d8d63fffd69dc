//! The collectives, composed over two levels: the region (shared memory), then the cluster (messages between hosts).
//!
//! Every collective is a [`Collective`]: what a rank puts into its slot and what a shard does with its slice. [`Channel`]
//! carries any of them through the steps of the region and the exchanges of the cluster; read one file, know all. Algorithms
//! name no transport.
//!
//! In a region: reduce-scatter and all-gather by slices of shared memory, every rank the owner of one. Between hosts each
//! shard brings its slice to an end, by an algorithm that suits its length and the number of hosts ([`inter_host`]); those for
//! long slices move 2 (n - 1) / n of it, the least there is (Patarasuk and Yuan, 2009). The order of addition is fixed: the
//! ranks of a host in order, then the hosts in the order of a tree.

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
mod text_allgather;
mod zero_copy;

pub use call::{Call, CallConfig, Op};
pub use channel::Channel;
pub(crate) use inter_host::InterHost;
pub use inter_host::{Algorithm, AlgorithmSetting};
pub use mismatch::MismatchEntry;
pub use small_message::PostedCall;
