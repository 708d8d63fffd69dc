//! A receive that waits long, while the rank that must send waits in a call of which this rank is a part: neither goes on.
//! The call then fails as different calls do; the receive goes on.
//!
//! It is known only of receives from one rank: another rank may send to one from any rank, and a long message that is sent
//! may be under way.
//! Thread rule: used by the thread that waits.

use std::any::Any;
use std::cell::RefCell;
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::progress::{Peers, State};
use super::request::Request;

/// A receive that waits so long looks at the calls of this process.
const LONG: Duration = Duration::from_secs(1);
/// How often.
const LOOK_EVERY: Duration = Duration::from_millis(500);
/// After so many looks in which the sender waits for this rank: a message may have been under way.
const LOOKS: u32 = 8;

/// The wait of a thread.
pub(super) struct LongReceive {
    next: RefCell<Looks>,
}

struct Looks {
    at: Instant,
    /// Those in which the sender waited for a call of this rank.
    in_vain: u32,
    /// Makes the wait known. Not before the sender waits: else the message may come, however late, and this rank goes on.
    known: Option<Box<dyn Any>>,
}

impl LongReceive {
    /// It begins.
    pub fn begin() -> LongReceive {
        LongReceive { next: RefCell::new(Looks { at: Instant::now() + LONG, in_vain: 0, known: None }) }
    }

    /// Looks, if it is time. `awaited` finds the sender and a name of the receive, if no message has matched it.
    pub fn look(&self, peers: &Peers, awaited: impl FnOnce() -> Option<(usize, String)>) {
        let mut looks = self.next.borrow_mut();
        let Some(calls) = peers.calls.as_ref().filter(|_| Instant::now() >= looks.at) else { return };
        looks.at = Instant::now() + LOOK_EVERY;
        calls.look();
        let waiting = calls.waiting_for_this_rank();
        let Some((_, name)) = awaited().filter(|(sender, _)| waiting.contains_key(sender)) else {
            (looks.in_vain, looks.known) = (0, None);
            return;
        };
        looks.known.get_or_insert_with(|| Arc::clone(calls).wait_in(name));
        looks.in_vain += 1;
        if looks.in_vain >= LOOKS {
            looks.in_vain = 0;
            calls.give_up();
        }
    }
}

impl State {
    /// The rank of the job for whose message a receive waits, and its name, if it is posted.
    pub(super) fn awaited(&self, request: &Request) -> Option<(usize, String)> {
        let is_it = |other: &Arc<Request>| std::ptr::eq(&raw const **other, request);
        let (pattern, receive) = self.matching.posted().find(|(_, receive)| is_it(&receive.request))?;
        let sender = pattern.source?;
        let from = format!("from {}", self.peers.name(sender));
        Some((sender, receive.limits.describe("receive", pattern.tag, &from)))
    }
}
