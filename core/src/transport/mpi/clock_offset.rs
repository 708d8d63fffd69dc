//! The offsets of the hosts' clocks.

use std::time::Instant;

use super::comm::Comm;
use crate::clock::monotonic;
use crate::error::Result;
use crate::transport::WaitContext;

/// Samples of an offset; the one with the shortest round trip is used.
const SAMPLES: usize = 8;
/// Tag of the messages.
const TAG: usize = 1;

/// The clock of the first host minus this host's clock, in nanoseconds. The error is at most half of a round trip
/// (Cristian, 1989). Called by the first ranks of all hosts, `leaders`; `me` is the index of this host.
pub(super) fn clock_offset(comm: &Comm, leaders: &[usize], me: usize, wait_ctx: &WaitContext<'_>) -> Result<i64> {
    if me == 0 {
        for &leader in &leaders[1..] {
            for _ in 0..SAMPLES {
                receive(comm, leader, wait_ctx)?;
                send(comm, leader, monotonic(Instant::now()), wait_ctx)?;
            }
        }
        return Ok(0);
    }
    let mut best = (i64::MAX, 0);
    for _ in 0..SAMPLES {
        let before = monotonic(Instant::now());
        send(comm, leaders[0], 0, wait_ctx)?;
        let remote = receive(comm, leaders[0], wait_ctx)?;
        let after = monotonic(Instant::now());
        best = best.min((after - before, remote - (before + (after - before) / 2)));
    }
    Ok(best.1)
}

fn send(comm: &Comm, to: usize, value: i64, wait_ctx: &WaitContext<'_>) -> Result<()> {
    let bytes = Vec::from(value.to_le_bytes());
    // SAFETY: the bytes live until the request completes, and are leaked if it never does.
    let request = unsafe { comm.send(&bytes, to, TAG) }?;
    let sent = comm.wait(&mut [request], wait_ctx, "the other hosts");
    if sent.is_err() {
        bytes.leak();
    }
    sent
}

fn receive(comm: &Comm, from: usize, wait_ctx: &WaitContext<'_>) -> Result<i64> {
    let mut bytes = vec![0u8; 8];
    // SAFETY: as above.
    let request = unsafe { comm.receive(&mut bytes, from, TAG) }?;
    let received = comm.wait(&mut [request], wait_ctx, "the other hosts");
    let mut value = [0; 8];
    value.copy_from_slice(&bytes);
    if let Err(error) = received {
        bytes.leak();
        return Err(error);
    }
    Ok(i64::from_le_bytes(value))
}
