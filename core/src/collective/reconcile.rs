//! Reconciliation of differing calls.
//!
//! Thread rule: that of [`Channel`].

use super::channel::Channel;
use super::matching::{self, Lacking, PendingCalls, Reconciliation};
use super::value_allgather;
use crate::error::{Error, Result};
use crate::transport::WaitContext;

impl Channel {
    /// Sends all ranks `list`, the calls pending here, and returns the common decision, and who lacks calls.
    ///
    /// # Errors
    /// As for [`Channel::run_first_chunk`].
    pub fn reconcile(&mut self, list: &PendingCalls, wait_ctx: &WaitContext<'_>) -> Result<(Reconciliation, Lacking)> {
        let max_bytes = value_allgather::max_value_bytes(self);
        let mut pages = list.pages(max_bytes);
        // By rank, on the ranks that decide.
        let mut lists: Vec<PendingCalls> = Vec::new();
        let mut decide = |pages: Vec<(PendingCalls, bool)>| {
            let more = pages.iter().any(|(_, more)| *more);
            if lists.is_empty() {
                lists = pages.into_iter().map(|(page, _)| page).collect();
            } else {
                lists.iter_mut().zip(pages).for_each(|(list, (page, _))| list.calls.extend(page.calls));
            }
            // The result has room for twice as much as a value.
            (!more).then(|| (matching::decide(&lists).truncated(max_bytes), matching::lacking(&lists, max_bytes)))
        };
        let decision = loop {
            let empty = || PendingCalls { calls: Vec::new(), ..*list };
            let page = pages.next().unwrap_or_else(empty);
            let more = pages.len() > 0;
            if let Some(decision) = value_allgather::allgather_merge(self, &(page, more), wait_ctx, &mut decide)? {
                break decision;
            }
        };
        match &decision.0 {
            Reconciliation::Fail(calls) | Reconciliation::Contrary(calls) | Reconciliation::Refused(calls)
                if calls.len() != self.topology.size() =>
            {
                Err(Error::Internal("the decision on the calls does not name every rank".into()))
            }
            _ => Ok(decision),
        }
    }
}
