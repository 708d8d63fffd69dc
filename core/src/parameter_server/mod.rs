//! A parameter server: tensors that any rank of a group reads and updates at any time, without the others taking part.
//!
//! Each rank owns a shard of every tensor (Li et al., "Scaling Distributed Machine Learning with the Parameter Server",
//! 2014; TorchMPI's parameter server). On one host whoever sends an update applies it to the owner's memory, under a lock
//! for each block ([`shards`]): no server thread, no message. Between hosts a thread of the owner applies messages
//! ([`remote`]). float16 and bfloat16 are stored as float32. An update is applied once: an operation that fails in the
//! middle ends the server on all ranks, as the loss of a rank does. One rank's operations take effect in their order.

pub mod block_lock;
mod layout;
mod operation;
mod remote;
mod rule;
mod server;
mod shards;
mod state;

pub use layout::Layout;
pub use operation::{Action, Operation};
pub use rule::Rule;
pub use server::ParameterServer;
pub use shards::Shards;
pub use state::OwnMemory;
