//! MPI: bootstrap of the job, and messages between hosts. No other module names MPI.
//!
//! Every transfer is non-blocking and polled under a deadline, on a duplicated communicator whose errors are returned.
//! Thread rule: group threads call MPI concurrently with `MPI_THREAD_MULTIPLE`, and one at a time with
//! `MPI_THREAD_SERIALIZED`. With a lower level, a job must not span hosts.

/// The library's name in JSON and messages.
pub const NAME: &str = "mpi";

mod bootstrap;
mod by_store;
mod clock_offset;
mod comm;
mod launcher;
mod lifetime;
mod link;
mod messages;
mod pmi;
mod pmi_server;
mod probe;
mod startup;
mod ways;

pub use bootstrap::connect;
pub use by_store::{PreparedStart, StartedNetwork, is_started_by_others, prepare_start, start_network};
pub use launcher::{identity, launched, leave_launcher, torchrun_identity, torchrun_position};
pub use lifetime::{LibraryInfo, end, library_info};
pub use ways::{Way, Ways};
