//! MPI: brings the job up, tells where the ranks are, and carries messages between hosts. Nothing else names MPI.
//!
//! Every transfer is non-blocking and polled under a deadline, on a communicator of the team's own whose errors return.
//! Thread rule: team threads call MPI side by side when it grants `MPI_THREAD_MULTIPLE`, one at a time when it grants
//! `MPI_THREAD_SERIALIZED`; with less, teams must not span hosts.

mod comm;
mod launcher;
mod lifetime;
mod link;
mod mpi_info;
mod probe;
mod rank_info;
mod startup;
mod world;

pub use launcher::{connection, identity, launched};
pub use lifetime::end;
pub use mpi_info::{MpiInfo, mpi_info};
pub use rank_info::RankInfo;
pub use world::{TeamShape, World};
