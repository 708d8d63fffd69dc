//! What carries bytes: memory shared by the ranks of a host ([`node`], made by [`shm`] or [`threads`]) and messages
//! between hosts ([`Link`], by [`mpi`] or [`threads`]). Collectives name neither.
//!
//! Every wait here spins briefly, then sleeps, and asks its [`Patience`] now and then whether to go on.

pub mod alert;
pub mod arena;
pub mod flag;
pub mod hosts;
pub mod memory;
pub mod mpi;
pub mod node;
pub mod patience;
pub mod private;
pub mod process;
pub mod shm;
#[cfg_attr(loom, path = "model.rs")]
pub mod sync;
pub mod threads;

pub use node::{Node, NodeChannel, Phase};
pub use patience::Patience;

use std::sync::Arc;

use crate::error::Result;
use crate::topology::Topology;

/// What one rank needs to make a team.
pub struct Endpoint {
    /// Where the rank is.
    pub topology: Arc<Topology>,
    /// Its view of the host's memory.
    pub node: Arc<Node>,
    /// The link of each channel, for a rank that drives a lane where there are several hosts.
    pub links: Vec<Option<Box<dyn Link>>>,
}

/// What one exchange sends.
#[derive(Debug, Clone, Copy)]
pub enum Out<'a> {
    /// To every host the message prepared for it: that many bytes of [`Link::message_to`] (this host's number is not used).
    Each(&'a [usize]),
    /// To every host the same message: that many bytes of [`Link::message_to_all`].
    Same(usize),
}

/// The message channel between one lane's drivers on all hosts, hosts being numbered as in the topology.
///
/// The link owns the messages, so that a transfer that outlives an aborted call never touches freed memory. Message
/// memory is aligned to [`crate::plan::ALIGN`] bytes.
/// Thread rule: used by one thread at a time.
pub trait Link: Send {
    /// The message for `host` of the next exchange.
    fn message_to(&mut self, host: usize) -> &mut [u8];

    /// The message for all hosts of the next exchange.
    fn message_to_all(&mut self) -> &mut [u8];

    /// Sends to, and receives from, every other host; returns when both are done.
    ///
    /// # Errors
    /// When the patience ends or the transport fails; the link can then not be used any more.
    fn exchange(&mut self, out: Out<'_>, patience: &Patience<'_>) -> Result<()>;

    /// What came from `host` in the last exchange (as long as the longest message; the sender's length is in its content).
    fn message_from(&self, host: usize) -> &[u8];
}
