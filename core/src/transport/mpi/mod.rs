//! MPI: brings the job up, tells where the ranks are, and carries messages between hosts. Nothing else names MPI.
//!
//! Every transfer is non-blocking and polled under a deadline, on a communicator of the team's own whose errors return.
//! Thread rule: team threads call MPI side by side when it grants `MPI_THREAD_MULTIPLE`, one at a time when it grants
//! `MPI_THREAD_SERIALIZED`; with less, teams must not span hosts.

/// The name of the library, in JSON and messages.
pub const NAME: &str = "mpi";

mod comm;
mod launcher;
mod library_info;
mod lifetime;
mod link;
mod probe;
mod rank_info;
mod startup;
mod world;

pub use launcher::{identity, launched, leave_launcher};
pub use library_info::{LibraryInfo, library_info};
pub use lifetime::end;
pub use rank_info::RankInfo;
pub use world::{TeamShape, World};
