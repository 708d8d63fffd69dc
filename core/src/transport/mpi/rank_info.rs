//! Information that the ranks exchange at start: host, process, and the offsets of the hosts' clocks.

use std::fs;
use std::os::unix::fs::MetadataExt;
use std::time::Instant;

use serde::{Deserialize, Serialize};

use super::comm::Comm;
use crate::clock::monotonic;
use crate::codec::{decode, encode};
use crate::error::{Error, Result};
use crate::transport::WaitContext;

/// Size of an exchanged record in bytes.
const RECORD: usize = 2048;
/// The most bytes of a text in a record, which has two at most.
const MAX_TEXT_BYTES: usize = 1000;
/// Samples of a clock offset; the one with the shortest round trip is used.
const CLOCK_SAMPLES: usize = 8;
/// Tag of clock messages.
const CLOCK_TAG: usize = 1;

/// Host and process of a rank.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct RankInfo {
    /// Host name.
    pub host: String,
    /// The kernel's boot id: equal in all containers of a machine.
    #[serde(rename = "boot_id")]
    pub boot: String,
    /// The device number of the file system of `DL_COMM_SHM_DIR`.
    #[serde(rename = "shm_device")]
    pub device: String,
    /// Process id.
    pub pid: i32,
    /// The pid namespace of `pid`.
    pub pid_namespace: String,
}

impl RankInfo {
    /// Display name for messages: `rank 3 on host (pid 7)`.
    pub fn display_name(&self, rank: usize) -> String {
        format!("rank {rank} on {} (pid {})", self.host, self.pid)
    }

    /// Equal for ranks that can share memory.
    pub(super) fn host_key(&self) -> (&str, &str, &str) {
        (&self.host, &self.boot, &self.device)
    }
}

/// Gathers the information of all ranks and agrees on a random key. `shm_dir` is the directory of segments. Collective.
pub(super) fn exchange_rank_info(
    comm: &Comm,
    shm_dir: &str,
    wait_ctx: &WaitContext<'_>,
) -> Result<(Vec<RankInfo>, u128)> {
    let host = rustix::system::uname().nodename().to_string_lossy().into_owned();
    let boot = fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap_or_default();
    let device = fs::metadata(shm_dir).map(|folder| folder.dev()).unwrap_or_default();
    let pid_namespace =
        fs::read_link("/proc/self/ns/pid").map(|link| link.to_string_lossy().into_owned()).unwrap_or_default();
    let mut key = [0u8; 16];
    rustix::rand::getrandom(&mut key, rustix::rand::GetRandomFlags::empty())
        .map_err(|error| Error::system("drawing a random number", error))?;
    let mine = RankInfo {
        host: shortened(&host),
        boot: shortened(boot.trim()),
        device: device.to_string(),
        pid: rustix::process::getpid().as_raw_nonzero().get(),
        pid_namespace: shortened(&pid_namespace),
    };
    let records = all_records(comm, &(mine, u128::from_ne_bytes(key)), wait_ctx)?;
    let records: Vec<(RankInfo, u128)> = records.iter().map(|bytes| decode(bytes)).collect::<Result<_>>()?;
    // The key of rank 0 is the job's.
    let key = records[0].1;
    Ok((records.into_iter().map(|(info, _)| info).collect(), key))
}

/// The clock of the first host minus this host's clock, in nanoseconds. The error is at most half of a round trip
/// (Cristian, 1989). Called by the first ranks of all hosts, `leaders`; `me` is the index of this host.
pub(super) fn clock_offset(comm: &Comm, leaders: &[usize], me: usize, wait_ctx: &WaitContext<'_>) -> Result<i64> {
    if me == 0 {
        for &leader in &leaders[1..] {
            for _ in 0..CLOCK_SAMPLES {
                receive(comm, leader, wait_ctx)?;
                send(comm, leader, monotonic(Instant::now()), wait_ctx)?;
            }
        }
        return Ok(0);
    }
    let mut best = (i64::MAX, 0);
    for _ in 0..CLOCK_SAMPLES {
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

/// Every rank's `record`, encoded.
///
/// # Errors
/// Those of MPI, and when the wait context ends.
pub(super) fn all_records<T: Serialize>(comm: &Comm, record: &T, wait_ctx: &WaitContext<'_>) -> Result<Vec<Vec<u8>>> {
    let mut bytes = encode(record).unwrap_or_default();
    if bytes.len() > RECORD {
        // No rank can decode an empty record: all fail.
        bytes.clear();
    }
    bytes.resize(RECORD, 0xff);
    comm.allgather(&bytes, wait_ctx)
}

/// The first characters of a text that goes into a record.
pub(super) fn shortened(text: &str) -> String {
    text[..text.floor_char_boundary(MAX_TEXT_BYTES)].to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_record_fits_and_padding_alone_is_none() {
        let text = shortened(&"ä".repeat(RECORD));
        assert_eq!(text.len(), MAX_TEXT_BYTES);
        let record = (text, Err::<(), _>((-8, shortened(&"x".repeat(RECORD)))));
        assert!(encode(&record).is_ok_and(|bytes| bytes.len() <= RECORD));
        assert!(decode::<(String, Option<String>)>(&[0xff; RECORD]).is_err());
    }
}
