//! What carries bytes: memory shared by the ranks of a host ([`node`], made by [`shm`] or [`threads`]), messages between
//! hosts ([`Link`], by [`mpi`] or [`threads`]), and GPUs ([`cuda`]). Collectives name neither of the first two.
//!
//! Every wait here spins briefly, then sleeps, and asks its [`Patience`] now and then whether to go on.

pub mod alert;
pub mod arena;
pub mod cuda;
pub mod flag;
pub mod handshake;
pub mod hosts;
mod layout;
pub mod memory;
pub mod mpi;
pub mod network;
pub mod node;
pub mod patience;
pub mod private;
pub mod process;
pub mod shm;
mod space;
pub mod step;
#[cfg_attr(loom, path = "model.rs")]
pub mod sync;
pub mod threads;

pub use network::Network;
pub use node::{Node, NodeChannel, Phase};
pub use patience::Patience;

use std::ops::Range;
use std::sync::Arc;

use crate::error::Result;
use crate::topology::Topology;

/// What one rank needs to make a team.
pub struct Endpoint {
    /// Where the rank is.
    pub topology: Arc<Topology>,
    /// The names of all ranks of the job, for messages.
    pub names: Arc<[String]>,
    /// Its view of the host's memory.
    pub node: Arc<Node>,
    /// The link of each channel, for a rank that drives a lane where there are several hosts.
    pub links: Vec<Option<Box<dyn Link>>>,
    /// What is known of the network between the hosts; the same on all ranks.
    pub network: Network,
    /// Whether a host has fewer processors than its ranks have threads of this team; the same on all ranks.
    pub crowded: bool,
}

/// A message of an exchange: that part of a [`Mail`]'s bytes goes to, or comes from, `host`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Message {
    /// The other host.
    pub host: usize,
    /// Where the message is; on reception the room for it, which it may not fill.
    pub bytes: Range<usize>,
}

/// The memory of one exchange; it starts at a multiple of [`crate::plan::ALIGN`] bytes.
pub struct Mail<'a> {
    /// What messages are sent from.
    pub out: &'a mut [u8],
    /// What they are received into.
    pub inbox: &'a mut [u8],
}

/// How many exchanges may be under way at once on a link.
pub const TURNS: usize = 2;

/// The message channel between one lane's drivers on all hosts, hosts being numbered as in the topology. Two exchanges may
/// be under way at once, one of each turn (0 and 1); the messages of one turn from one host to another arrive in order.
///
/// The link owns the memory, so that a transfer that outlives an aborted call never touches freed memory.
/// Thread rule: used by one thread at a time.
pub trait Link: Send {
    /// The memory of `turn`; not to be touched while an exchange of that turn is under way.
    fn mail(&mut self, turn: usize) -> Mail<'_>;

    /// Starts to send and to receive messages; none of them overlap.
    ///
    /// # Errors
    /// When the transport fails; the link can then not be used any more.
    fn start(&mut self, turn: usize, sends: &[Message], receives: &[Message]) -> Result<()>;

    /// Returns when the exchange of `turn` that was started is done.
    ///
    /// # Errors
    /// When the patience ends or the transport fails; the link can then not be used any more.
    fn finish(&mut self, turn: usize, patience: &Patience<'_>) -> Result<()>;
}
