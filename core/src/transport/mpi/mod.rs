//! MPI: bootstrap of the job, and messages between hosts. No other module names MPI.
//!
//! Every transfer is non-blocking and polled under a deadline, on a duplicated communicator whose errors are returned.
//! Thread rule: group threads call MPI concurrently with `MPI_THREAD_MULTIPLE`, and one at a time with
//! `MPI_THREAD_SERIALIZED`. With a lower level, a job must not span hosts.

/// The library's name in JSON and messages.
pub const NAME: &str = "mpi";

mod bootstrap;
mod clock_offset;
mod comm;
mod launcher;
mod lifetime;
mod link;
mod messages;
mod probe;
mod startup;

pub use bootstrap::connect;
pub use launcher::{identity, launched, leave_launcher};
pub use lifetime::{LibraryInfo, end, is_started, library_info};
