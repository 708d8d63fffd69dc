//! A group: its queue, its threads, and the life of a call.
//!
//! `submit` validates, lays out and enqueues a call, and returns. The leader ([`lead`]) runs calls in order. A call's
//! first chunk checks that all ranks have the same call. Only then do the helpers get the other chunks, so they see the
//! calls in the same order on all ranks. Between hosts several calls are under way together (`concurrent_calls`). Ranks
//! with differing calls reconcile them ([`crate::collective::matching`]). Calls that match by name and have no
//! counterpart are then set aside (`counterparts`). The thread that finishes a call's last part completes it. A call on
//! memory of a call before it starts after that one has ended (`unfinished`).
//!
//! A failure that leaves the ranks out of sync (a deadline, a lost peer) ends the group: all pending and later calls
//! get that first error.
//! Thread rule: any thread may use a [`Group`].

mod active;
mod adasum;
mod call_limits;
mod call_summary;
mod callers;
mod client;
mod concurrent_calls;
mod copied_call;
mod counterparts;
mod device;
mod gpu_state;
mod group_deadline;
mod handle;
mod held;
mod join;
mod join_state;
mod lead;
mod lifecycle;
mod lost;
mod memory_use;
mod messenger;
mod monitor;
mod other_groups;
mod point_to_point;
mod process_groups;
mod queue;
mod ragged;
mod reconcile;
mod record;
mod recorder;
mod run_calls;
mod small_calls;
mod state;
mod stats;
mod submit;
mod thread;
mod totals;
mod unfinished;
mod work;
mod worker;

pub use adasum::start_adasum;
pub use handle::CallHandle;
pub use join::Join;
pub use join_state::{Position, last, position};
pub use lost::{Loss, check as check_lost_calls, end as end_lost_calls, synchronize};
pub use messenger::Messenger;
pub use point_to_point::MessageOptions;
pub use process_groups::{BlockedCaller, ProcessGroups};
pub use ragged::{Allocate, RaggedTensor, start_ragged};
pub use recorder::Submission;
pub use small_calls::{CallWords, SmallCallInput, TensorWords};
pub use state::OnFailure;
pub use submit::Group;
pub use totals::Totals;
pub use work::{CallOptions, OnComplete, Timeout, wait_for_result};
