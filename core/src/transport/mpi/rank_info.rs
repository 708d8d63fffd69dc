//! What the ranks tell each other when they meet: where they live, and how their hosts' clocks stand.

use std::fs;
use std::os::unix::fs::MetadataExt;
use std::time::Instant;

use super::comm::Comm;
use crate::clock::monotonic;
use crate::error::{Error, Result};
use crate::transport::WaitContext;

/// The bytes of the records that ranks tell each other; longer texts are cut.
const RECORD: usize = 1024;
/// How often a host's clock is compared with the first one's; the quickest answer counts.
const LOOKS: usize = 8;
/// Tells the messages about clocks from others.
const CLOCK_TAG: usize = 1;

/// Where a rank lives.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RankInfo {
    /// The name of its host.
    pub host: String,
    /// The kernel's boot: the same for containers of one machine.
    pub boot: String,
    /// The device of the file system behind the segments.
    pub device: String,
    /// Its process.
    pub pid: i32,
    /// The namespace in which `pid` counts.
    pub pid_namespace: String,
}

impl RankInfo {
    /// The rank there, which is `rank`, for messages: `rank 3 on host (pid 7)`.
    pub fn display_name(&self, rank: usize) -> String {
        format!("rank {rank} on {} (pid {})", self.host, self.pid)
    }

    /// The same for the ranks of one host.
    pub(super) fn host_key(&self) -> (&str, &str, &str) {
        (&self.host, &self.boot, &self.device)
    }
}

/// Every rank's place, and a random number that they have in common. `shm_dir` is where segments are made. Collective.
pub(super) fn exchange_rank_info(
    comm: &Comm,
    shm_dir: &str,
    wait_ctx: &WaitContext<'_>,
) -> Result<(Vec<RankInfo>, u128)> {
    let host = rustix::system::uname().nodename().to_string_lossy().into_owned();
    let boot = fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap_or_default();
    let device = fs::metadata(shm_dir).map(|folder| folder.dev()).unwrap_or_default();
    let space = fs::read_link("/proc/self/ns/pid").map(|link| link.to_string_lossy().into_owned()).unwrap_or_default();
    let device = device.to_string();
    let pid = std::process::id().to_string();
    let mut key = [0u8; 16];
    rustix::rand::getrandom(&mut key, rustix::rand::GetRandomFlags::empty())
        .map_err(|error| Error::system("drawing a random number", error))?;
    let key = format!("{:032x}", u128::from_ne_bytes(key));
    let records = comm.allgather(&record(&[&host, boot.trim(), &device, &pid, &space, &key]), wait_ctx)?;
    let place = |bytes: &Vec<u8>| {
        let [host, boot, device, pid, pid_space] = fields(bytes);
        RankInfo { host, boot, device, pid: pid.parse().unwrap_or(0), pid_namespace: pid_space }
    };
    // That of rank 0 is the job's.
    let [.., key] = fields::<6>(&records[0]);
    let key = u128::from_str_radix(&key, 16).map_err(|_| Error::Internal("a record of another job arrived".into()))?;
    Ok((records.iter().map(place).collect(), key))
}

/// What must be added to this host's monotonic clock, in nanoseconds, to have that of the first host, to within half the
/// time of a message there and back (Cristian, 1989). Called by the first rank of each host, `leaders`, this one being
/// that of host `me`.
pub(super) fn clock_offset(comm: &Comm, leaders: &[usize], me: usize, wait_ctx: &WaitContext<'_>) -> Result<i64> {
    if me == 0 {
        for &leader in &leaders[1..] {
            for _ in 0..LOOKS {
                receive(comm, leader, wait_ctx)?;
                send(comm, leader, monotonic(Instant::now()), wait_ctx)?;
            }
        }
        return Ok(0);
    }
    let mut best = (i64::MAX, 0);
    for _ in 0..LOOKS {
        let before = monotonic(Instant::now());
        send(comm, leaders[0], 0, wait_ctx)?;
        let there = receive(comm, leaders[0], wait_ctx)?;
        let after = monotonic(Instant::now());
        best = best.min((after - before, there - (before + (after - before) / 2)));
    }
    Ok(best.1)
}

fn send(comm: &Comm, to: usize, value: i64, wait_ctx: &WaitContext<'_>) -> Result<()> {
    let bytes = Vec::from(value.to_le_bytes());
    // SAFETY: the bytes live until the request is complete, and are leaked when it never is.
    let request = unsafe { comm.send(&bytes, to, CLOCK_TAG) }?;
    let sent = comm.wait(&mut [request], wait_ctx, "the other hosts");
    if sent.is_err() {
        bytes.leak();
    }
    sent
}

fn receive(comm: &Comm, from: usize, wait_ctx: &WaitContext<'_>) -> Result<i64> {
    let mut bytes = vec![0u8; 8];
    // SAFETY: as above.
    let request = unsafe { comm.receive(&mut bytes, from, CLOCK_TAG) }?;
    let received = comm.wait(&mut [request], wait_ctx, "the other hosts");
    let mut value = [0; 8];
    value.copy_from_slice(&bytes);
    if let Err(error) = received {
        bytes.leak();
        return Err(error);
    }
    Ok(i64::from_le_bytes(value))
}

/// `fields`, a NUL after each, cut and padded to [`RECORD`] bytes.
pub(super) fn record(fields: &[&str]) -> Vec<u8> {
    let mut bytes = fields.join("\0").into_bytes();
    bytes.resize(RECORD, 0);
    bytes
}

/// The first N fields of a record.
pub(super) fn fields<const N: usize>(record: &[u8]) -> [String; N] {
    let mut parts = record.split(|&byte| byte == 0).map(|part| String::from_utf8_lossy(part).into_owned());
    std::array::from_fn(|_| parts.next().unwrap_or_default())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn records_go_there_and_back() {
        let bytes = record(&["host", "", "x y"]);
        assert_eq!(bytes.len(), RECORD);
        assert_eq!(fields::<3>(&bytes), ["host", "", "x y"]);
        let long = "l".repeat(2 * RECORD);
        assert_eq!(fields::<2>(&record(&["a", &long]))[1].len(), RECORD - 2);
    }
}
