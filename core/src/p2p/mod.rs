//! Point to point: send and receive between two ranks, with tags.
//!
//! An [`Endpoint`] is a process's end of all its mailboxes ([`crate::transport::mailbox`]), through which it reaches the
//! ranks of its host, and of the network to the other hosts ([`remote`]). It matches messages and receives: messages of
//! one sender in their order, receives in the order in which they were posted. Nobody waits for another rank to start: a
//! send is complete when its bytes are in a cell or on their way, or the receiver has them. A receive of a short message looks
//! for it before it is posted, and for some time if its caller waits, which saves most of the time of such a message.
//! Progress is made by a thread that waits for a send or receive; if none does, by the thread `dlcomm-p2p`, which lives
//! only while something is under way.

mod device;
mod device_progress;
mod driver;
mod endings;
mod endpoint;
mod incoming;
mod long_receive;
mod matching;
mod message;
mod on_device;
mod outgoing;
mod pending;
mod progress;
mod remote;
mod remote_progress;
mod request;
mod routes;
mod transfer;

pub use device::{DeviceMemory, Span};
pub use endpoint::{Endpoint, Message};
pub use message::{Limits, Scope, Spans, Status};
pub use progress::Peers;
pub use remote::Hosts;
pub use request::{Request, Started, Then};
pub use routes::GroupRoutes;
pub use transfer::Transfer;
