//! A small call that was started, and waits for other ranks: this rank has posted its input, so they do not wait for
//! it.
//!
//! The leader holds it. Whoever waits for it completes it, which saves two thread switches. The group's thread completes
//! it if somebody tests the handle, waits with a limit or drops it, before the next call, and when the group looks for
//! ranks that lack a call. It gets a record, and what else a call needs, only if that must sleep, or if the ranks'
//! calls differ. Thread rule: belongs to the leader.

use std::time::Instant;

use super::callers::Origin;
use super::recorder::Submission;
use super::work::{OnComplete, Timeout};
use crate::collective::PostedCall;

/// See the module's documentation.
pub(super) struct HeldCall {
    /// The cached call that it is.
    pub index: usize,
    pub posted: PostedCall,
    pub submission: Submission,
    /// Its submission, if it is timed.
    pub since: Option<Instant>,
    /// Who has made it. A thread that waits has spun for it.
    pub origin: Origin,
    pub timeout: Timeout,
    pub done: OnComplete,
}
