//! Measures the network between hosts at start: a few messages between the first ranks of neighbouring hosts.

use std::time::Instant;

use super::comm::{Comm, Request};
use crate::error::Result;
use crate::transport::{NetworkModel, WaitContext};

const TAG: usize = 3;
/// Samples per constant; the median is used.
const SAMPLES: usize = 7;
/// Concurrent messages in a burst.
const BURST_MESSAGES: usize = 16;
/// Sizes of a short and a long message in bytes.
const SHORT: usize = 64;
const LONG: usize = 256 << 10;

/// Measures the network to rank `other`, which calls it at the same time.
///
/// # Errors
/// The wait context's errors, or a failure of MPI.
pub(super) fn measure(comm: &Comm, other: usize, wait_ctx: &WaitContext<'_>) -> Result<NetworkModel> {
    let latency = median(|| exchange(comm, other, 1, SHORT, wait_ctx))?;
    let burst = median(|| exchange(comm, other, BURST_MESSAGES, SHORT, wait_ctx))?;
    let long = median(|| exchange(comm, other, 1, LONG, wait_ctx))?;
    let gap = (burst - latency).max(0.0) / (BURST_MESSAGES - 1) as f64;
    Ok(NetworkModel {
        latency_s: latency,
        message_gap_s: gap,
        byte_s: (long - latency).max(0.0) / (LONG - SHORT) as f64,
    })
}

/// The median of the samples, after one warm-up.
fn median(mut measure: impl FnMut() -> Result<f64>) -> Result<f64> {
    measure()?;
    let mut seconds = (0..SAMPLES).map(|_| measure()).collect::<Result<Vec<f64>>>()?;
    seconds.sort_by(f64::total_cmp);
    Ok(seconds[SAMPLES / 2])
}

/// Time in seconds to exchange `count` messages in each direction.
fn exchange(comm: &Comm, other: usize, count: usize, bytes: usize, wait_ctx: &WaitContext<'_>) -> Result<f64> {
    let send = vec![1u8; bytes];
    let mut recv = vec![0u8; count * bytes];
    let from = Instant::now();
    let done = post(comm, other, &send, &mut recv)
        .and_then(|mut requests| comm.wait(&mut requests, wait_ctx, "the neighbouring host"));
    if done.is_err() {
        // MPI may still access the buffers.
        send.leak();
        recv.leak();
    }
    done.map(|()| from.elapsed().as_secs_f64())
}

fn post(comm: &Comm, other: usize, send: &[u8], recv: &mut [u8]) -> Result<Vec<Request>> {
    let mut requests = Vec::new();
    for buffer in recv.chunks_exact_mut(send.len()) {
        // SAFETY: the memory lives until the requests complete, and is leaked if they never do.
        requests.push(unsafe { comm.receive(buffer, other, TAG) }?);
        // SAFETY: as above.
        requests.push(unsafe { comm.send(send, other, TAG) }?);
    }
    Ok(requests)
}
