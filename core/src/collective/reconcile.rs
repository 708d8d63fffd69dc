//! How ranks whose calls differ agree on what to run next, and on what to report.
//!
//! Thread rule: that of [`Channel`].

use std::collections::BTreeMap;

use super::channel::Channel;
use super::matching::{self, PendingCalls, Reconciliation};
use super::mismatch::{self, MismatchEntry};
use super::text_allgather::{self, RankTexts};
use crate::error::{Error, Result};
use crate::transport::WaitContext;

/// What a part of a list of calls starts with when another part follows.
const CONTINUED: &str = "+";

impl Channel {
    /// After different calls: tells all ranks `list`, the calls that wait here, and returns what all do next.
    ///
    /// # Errors
    /// As for [`Channel::first`].
    pub fn reconcile(&mut self, list: &PendingCalls, wait_ctx: &WaitContext<'_>) -> Result<Reconciliation> {
        let limit = text_allgather::max_text_bytes(self);
        let text = matching::encode(list);
        let mut pages = text.as_bytes().chunks(limit - CONTINUED.len());
        // By rank, on the ranks that decide.
        let mut so_far: BTreeMap<usize, String> = BTreeMap::new();
        let mut decide = |texts: &RankTexts| {
            for (rank, page) in texts {
                so_far.entry(*rank).or_default().push_str(page.trim_start_matches(CONTINUED));
            }
            if texts.iter().any(|(_, page)| page.starts_with(CONTINUED)) {
                return CONTINUED.to_owned();
            }
            let lists: Option<Vec<PendingCalls>> = so_far.values().map(|text| matching::decode(text)).collect();
            lists.map_or(String::new(), |lists| matching::decide(&lists).encode_within(limit))
        };
        let text = loop {
            let page = String::from_utf8_lossy(pages.next().unwrap_or_default());
            let mark = if pages.len() > 0 { CONTINUED } else { "" };
            let text = text_allgather::allgather_merge(self, &format!("{mark}{page}"), wait_ctx, &mut decide)?;
            if text != CONTINUED {
                break text;
            }
        };
        let ranks = self.topology.size();
        match Reconciliation::decode(&text) {
            Some(Reconciliation::Fail(places)) if places.len() != ranks => None,
            decision => decision,
        }
        .ok_or_else(|| Error::Internal("what the ranks told of their calls is not legible".into()))
    }

    /// The error of calls that do not match, the same on every rank, where every rank gives its account.
    pub fn explain(&mut self, account: &MismatchEntry<'_>, wait_ctx: &WaitContext<'_>) -> Error {
        mismatch::explain(self, account, wait_ctx)
    }
}
