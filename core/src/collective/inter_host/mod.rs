//! Reduction of a shard's slice between hosts, by one of several algorithms.
//!
//! The first chunk of a call also checks that all hosts issued the same call. Until then hosts may have calls of any
//! kind and size, so the message pattern must not depend on the call. The hosts run a [handshake] by recursive
//! doubling. The call's data travels with it, whole or in halves; the other algorithms send data after it. The handshake
//! also compares the calls behind this one. Later chunks start with their algorithm directly.
//!
//! All algorithms except the ring add in the order of one [tree] over the hosts, so they give the same bits.
//! A slice in flight is a state machine, so that many can be in flight: `start` sends the first messages, and `advance`
//! continues whenever all messages of the slice have completed. Each algorithm is a few stages of it.
//! Thread rule: as for [`super::Channel`].

mod cost;
mod exchange;
mod handshake;
mod handshake_state;
mod header;
mod pairwise;
mod ring;
mod stage;
mod tree;

pub(crate) use exchange::InterHost;
pub(super) use exchange::{InFlightSlice, Slice};
pub(super) use handshake_state::HostCalls;
