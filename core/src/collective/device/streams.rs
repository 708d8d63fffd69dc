//! Order between the caller's stream and the core's streams.

use std::sync::Arc;

use crate::collective::call::{Call, Op};
use crate::error::{Error, Result};
use crate::topology::Topology;
use crate::transport::gpu::{CallerStream, Event, Stream};

/// The outcome of a call.
pub enum DeviceResult {
    /// The call is enqueued; the event completes with it.
    Enqueued(Event),
    /// All ranks must run it through host memory.
    FallBackToHost,
}

/// The caller's stream of `call`, which is on device memory.
pub fn producer(call: &Call) -> Result<&Arc<CallerStream>> {
    call.producer().ok_or_else(|| Error::Internal("a call on host memory has no GPU".into()))
}

/// Makes `stream` wait for the call's inputs.
pub fn wait_inputs(call: &Call, stream: &Stream) -> Result<()> {
    stream.wait(producer(call)?.ready())
}

/// Makes the caller's stream wait for the work on `stream`.
pub fn signal_outputs(call: &Call, stream: &Stream) -> Result<Event> {
    let end = stream.record()?;
    producer(call)?.make_caller_wait(&end)?;
    Ok(end)
}

/// The broadcast's root as a local rank, if it is on this host.
pub fn root(call: &Call, topology: &Topology) -> Option<usize> {
    match call.op {
        Op::Broadcast { root } => {
            topology.host_and_local_rank(root).filter(|(host, _)| *host == topology.host()).map(|(_, local)| local)
        }
        Op::Allreduce | Op::Barrier => None,
    }
}
