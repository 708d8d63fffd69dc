//! MPI: bootstrap of the job, rank information, and messages between hosts. No other module names MPI.
//!
//! Every transfer is non-blocking and polled under a deadline, on a communicator per group whose errors are returned.
//! Thread rule: group threads call MPI concurrently with `MPI_THREAD_MULTIPLE`, and one at a time with
//! `MPI_THREAD_SERIALIZED`. With a lower level, a job must not span hosts.

/// The library's name in JSON and messages.
pub const NAME: &str = "mpi";

mod comm;
mod launcher;
mod lifetime;
mod link;
mod probe;
mod rank_info;
mod startup;
mod world;

pub use launcher::{identity, launched, leave_launcher};
pub use lifetime::{LibraryInfo, end, library_info};
pub use rank_info::RankInfo;
pub use world::World;
