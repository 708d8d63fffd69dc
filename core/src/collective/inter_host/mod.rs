//! A shard's slice of a chunk between hosts, by one of several algorithms.
//!
//! The *first* chunk of a call decides whether all hosts called the same thing. Before that is known, hosts may hold calls of
//! any kind and size, so the pattern of messages must not depend on the call: the hosts [meet](meeting) by recursive
//! doubling, and a call's data rides along, whole or in halves, or, for the other algorithms, follows. Further chunks go
//! straight to their [`Algorithm`].
//!
//! The order of addition is that of a [tree](Tree) over the hosts, which every algorithm keeps but the ring: the same bits.
//! Every chunk has two parts, so that two chunks can be under way: `start`, which sends the first messages, and `finish`.
//! Thread rule: as for [`super::Channel`].

mod algorithm;
mod cost;
mod exchange;
mod handshake;
mod handshake_state;
mod header;
mod pairwise;
mod ring;
mod tree;

pub use algorithm::{Algorithm, AlgorithmSetting};
pub(crate) use exchange::InterHost;
pub(super) use exchange::{InFlightSlice, Slice};
