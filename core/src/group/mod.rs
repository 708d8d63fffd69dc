//! A team: its queue, its threads, and the life of a call.
//!
//! `submit` checks, lays out and enqueues a call, and returns. The lead thread takes calls in order; with a call's first
//! chunk it finds out whether all ranks called the same, and only then hands the other chunks to the helpers, so the helpers
//! meet the calls in one order on all ranks. Ranks that met with different calls line them up
//! ([`crate::collective::lineup`]). The thread that ends a call's last part completes it.
//! A failure that leaves the ranks out of step (a deadline, a lost peer) ends the team: every call, waiting or new, gets
//! that first error.
//! Thread rule: a [`Group`] may be shared and used by any thread.

mod call_summary;
mod callers;
mod device;
mod executor;
mod lifecycle;
mod other_groups;
mod process_groups;
mod reconcile;
mod record;
mod small_calls;
mod state;
mod stats;
mod submit;
mod work;
mod worker;

pub use process_groups::{BlockedCaller, ProcessGroups};
pub use record::Totals;
pub use state::{GroupConfig, OnFailure};
pub use submit::Group;
pub use work::{CallOptions, OnComplete, Timeout, wait_for_result};
