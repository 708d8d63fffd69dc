//! The messages of a group: their context, and the translation of their ranks.
//!
//! Thread rule: any thread.

use std::sync::Arc;

use super::state::GroupState;
use crate::error::Error;
use crate::p2p::{Endpoint, GroupRoutes, Scope};

impl Scope for GroupState {
    fn context(&self) -> u64 {
        self.config.key.hash()
    }

    fn name(&self) -> String {
        self.config.key.name().to_string()
    }

    fn size(&self) -> usize {
        self.members.size()
    }

    fn to_world(&self, rank: usize) -> usize {
        self.members.to_world(rank)
    }

    fn of_world(&self, world: usize) -> Option<usize> {
        self.members.of_world(world)
    }

    fn has_failed(&self) -> bool {
        self.has_failed()
    }

    fn failure(&self) -> Option<Error> {
        self.failure()
    }
}

/// A group's way to send and receive.
pub struct Messenger {
    endpoint: Arc<Endpoint>,
    routes: GroupRoutes,
}

impl Messenger {
    /// Sends and receives through `endpoint` for a group.
    pub(super) fn new(endpoint: Arc<Endpoint>, state: &Arc<GroupState>) -> Messenger {
        let routes = endpoint.routes(Arc::clone(state) as Arc<dyn Scope>);
        Messenger { endpoint, routes }
    }

    pub(super) fn routes(&self) -> &GroupRoutes {
        &self.routes
    }

    /// The end of this process's mailboxes.
    pub fn endpoint(&self) -> &Arc<Endpoint> {
        &self.endpoint
    }
}
