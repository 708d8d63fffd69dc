//! A group as its messages see it: where each of its ranks is. Made at its first send or receive.
//!
//! Thread rule: read by any thread.

use std::sync::Arc;

use super::message::Scope;
use super::progress::Peers;
use crate::error::{Error, Result};

/// Where a rank is.
#[derive(Debug, Clone, Copy)]
pub(super) enum Route {
    /// This local rank of this host.
    Local(u32),
    /// On another host, which the network reaches.
    Far,
    /// On another host, without a network.
    Unreachable,
}

/// See the module's documentation.
pub struct GroupRoutes {
    scope: Arc<dyn Scope>,
    context: u64,
    /// This process's rank in the group; in the job, if the group has it not.
    me: usize,
    routes: Box<[Route]>,
    /// Whether messages may come from another host.
    has_far_ranks: bool,
}

impl GroupRoutes {
    /// The routes from rank `me` of the job.
    pub(super) fn new(scope: Arc<dyn Scope>, peers: &Peers, me: usize, has_network: bool) -> GroupRoutes {
        let far = if has_network { Route::Far } else { Route::Unreachable };
        let route = |rank| {
            let local = peers.local(scope.to_world(rank)).and_then(|local| u32::try_from(local).ok());
            local.map_or(far, Route::Local)
        };
        let routes: Box<[Route]> = (0..scope.size()).map(route).collect();
        let has_far_ranks = routes.iter().any(|route| matches!(route, Route::Far));
        let me = scope.of_world(me).unwrap_or(me);
        GroupRoutes { context: scope.context(), me, routes, has_far_ranks, scope }
    }

    /// The group.
    pub(super) fn scope(&self) -> &Arc<dyn Scope> {
        &self.scope
    }

    /// See [`Scope::context`].
    pub(super) fn context(&self) -> u64 {
        self.context
    }

    /// This process's rank in the group.
    pub(super) fn me(&self) -> usize {
        self.me
    }

    /// Whether the message of a receive from `source`, or from any rank, may come from another host.
    pub(super) fn awaits_network(&self, source: Option<usize>) -> bool {
        source.map_or(self.has_far_ranks, |rank| matches!(self.routes[rank], Route::Far))
    }

    /// The way to a rank that this process can reach.
    ///
    /// # Errors
    /// [`Error::Invalid`] if there is none; `what` says what it was wanted for.
    #[inline]
    pub(super) fn to(&self, rank: usize, what: &str) -> Result<Route> {
        match self.routes.get(rank) {
            Some(Route::Unreachable) | None => Err(self.unreachable(rank, what)),
            Some(&route) => Ok(route),
        }
    }

    #[cold]
    fn unreachable(&self, rank: usize, what: &str) -> Error {
        let (name, size) = (self.scope.name(), self.routes.len());
        Error::Invalid(if rank >= size {
            format!("{what} rank {rank} of {name}, which has {size}")
        } else {
            format!(
                "{what} rank {rank} of {name}, which is on another host; there is no network for messages between hosts"
            )
        })
    }
}
