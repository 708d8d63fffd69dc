//! The messages of a group: their context, and the translation of their ranks.
//!
//! Thread rule: any thread.

use std::sync::Arc;

use xxhash_rust::xxh3::xxh3_64;

use super::state::GroupState;
use crate::error::Error;
use crate::p2p::{Endpoint, Scope};

/// The group's part of its messages.
struct GroupScope {
    state: Arc<GroupState>,
    size: usize,
    context: u64,
}

impl Scope for GroupScope {
    fn context(&self) -> u64 {
        self.context
    }

    fn name(&self) -> String {
        format!("team {}", self.state.settings.id)
    }

    fn size(&self) -> usize {
        self.size
    }

    // The only place where ranks of messages are translated; a group has all ranks of the world.
    fn to_world(&self, rank: usize) -> usize {
        rank
    }

    fn of_world(&self, world: usize) -> Option<usize> {
        Some(world)
    }

    fn failure(&self) -> Option<Error> {
        self.state.failure()
    }
}

/// A group's way to send and receive.
pub struct Messenger {
    endpoint: Arc<Endpoint>,
    scope: Arc<dyn Scope>,
}

impl Messenger {
    /// Sends and receives through `endpoint` for a group of `size` ranks.
    pub(super) fn new(endpoint: Arc<Endpoint>, state: &Arc<GroupState>, size: usize) -> Messenger {
        let context = xxh3_64(format!("team {}", state.settings.id).as_bytes());
        Messenger { endpoint, scope: Arc::new(GroupScope { state: Arc::clone(state), size, context }) }
    }

    pub(super) fn scope(&self) -> &Arc<dyn Scope> {
        &self.scope
    }

    /// The end of this process's mailboxes.
    pub fn endpoint(&self) -> &Arc<Endpoint> {
        &self.endpoint
    }
}
