//! The order between the caller's stream and the core's.

use std::sync::Arc;

use crate::collective::call::{Call, Op};
use crate::error::{Error, Result};
use crate::topology::Topology;
use crate::transport::gpu::{CallerStream, Event, Stream};

/// What came of a call.
pub enum DeviceResult {
    /// It is enqueued; all is done when the event comes.
    Enqueued(Event),
    /// It has to go through host memory, on all ranks.
    FallBackToHost,
}

/// Who makes and awaits the tensors of `call`, which is on device memory.
pub fn producer(call: &Call) -> Result<&Arc<CallerStream>> {
    call.producer().ok_or_else(|| Error::Internal("a call on host memory has no GPU".into()))
}

/// Lets `stream` wait for what the call's tensors wait for.
pub fn wait_inputs(call: &Call, stream: &Stream) -> Result<()> {
    stream.wait(producer(call)?.ready())
}

/// Lets what waits for the call's tensors wait for what `stream` has been given.
pub fn signal_outputs(call: &Call, stream: &Stream) -> Result<Event> {
    let end = stream.record()?;
    producer(call)?.make_caller_wait(&end)?;
    Ok(end)
}

/// The local rank on this host that a broadcast is from.
pub fn root(call: &Call, topology: &Topology) -> Option<usize> {
    match call.op {
        Op::Broadcast { root } => {
            topology.host_and_local_rank(root).filter(|(host, _)| *host == topology.host()).map(|(_, local)| local)
        }
        Op::Allreduce | Op::Barrier => None,
    }
}
