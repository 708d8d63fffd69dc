//! Measures the network between the hosts when a job starts: a few messages between the first ranks of neighbouring hosts.

use std::time::Instant;

use super::comm::{Comm, Request};
use crate::error::Result;
use crate::transport::{NetworkModel, WaitContext};

const TAG: usize = 3;
/// How often each figure is measured; the median counts.
const SAMPLES: usize = 7;
/// Messages at once.
const BURST_MESSAGES: usize = 16;
/// Bytes of a short message and of a long one.
const SHORT: usize = 64;
const LONG: usize = 256 << 10;

/// What the first ranks of two hosts measure between them; `other` is the rank of the other one. Called by both at once.
///
/// # Errors
/// When the wait context ends or MPI fails.
pub(super) fn measure(comm: &Comm, other: usize, wait_ctx: &WaitContext<'_>) -> Result<NetworkModel> {
    let latency = median(|| exchange(comm, other, 1, SHORT, wait_ctx))?;
    let burst = median(|| exchange(comm, other, BURST_MESSAGES, SHORT, wait_ctx))?;
    let long = median(|| exchange(comm, other, 1, LONG, wait_ctx))?;
    let further = (burst - latency).max(0.0) / (BURST_MESSAGES - 1) as f64;
    Ok(NetworkModel {
        latency_s: latency,
        message_gap_s: further,
        byte_s: (long - latency).max(0.0) / (LONG - SHORT) as f64,
    })
}

/// The median of some measurements, after one that does not count.
fn median(mut measure: impl FnMut() -> Result<f64>) -> Result<f64> {
    measure()?;
    let mut seconds = (0..SAMPLES).map(|_| measure()).collect::<Result<Vec<f64>>>()?;
    seconds.sort_by(f64::total_cmp);
    Ok(seconds[SAMPLES / 2])
}

/// The seconds that it takes to send `count` messages to the other rank and to receive as many at the same time.
fn exchange(comm: &Comm, other: usize, count: usize, bytes: usize, wait_ctx: &WaitContext<'_>) -> Result<f64> {
    let out = vec![1u8; bytes];
    let mut inbox = vec![0u8; count * bytes];
    let from = Instant::now();
    let done = post(comm, other, &out, &mut inbox)
        .and_then(|mut requests| comm.wait(&mut requests, wait_ctx, "the neighbouring host"));
    if done.is_err() {
        // MPI may still read or write these.
        out.leak();
        inbox.leak();
    }
    done.map(|()| from.elapsed().as_secs_f64())
}

fn post(comm: &Comm, other: usize, out: &[u8], inbox: &mut [u8]) -> Result<Vec<Request>> {
    let mut requests = Vec::new();
    for room in inbox.chunks_exact_mut(out.len()) {
        // SAFETY: the memory lives until the requests are complete, and is leaked when they never are.
        requests.push(unsafe { comm.receive(room, other, TAG) }?);
        // SAFETY: as above.
        requests.push(unsafe { comm.send(out, other, TAG) }?);
    }
    Ok(requests)
}
