//! Information about host and process that the ranks exchange at start.

use std::fs;
use std::os::unix::fs::MetadataExt;

use serde::{Deserialize, Serialize};

use super::bootstrap::{Bootstrap, encode_record, gather_records, shortened};
use super::wait_context::WaitContext;
use crate::codec::decode;
use crate::error::{Error, Result};

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
    bootstrap: &dyn Bootstrap,
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
    let records = gather_records(bootstrap, &encode_record(&(mine, u128::from_ne_bytes(key))), wait_ctx)?;
    let records: Vec<(RankInfo, u128)> = records.iter().map(|bytes| decode(bytes)).collect::<Result<_>>()?;
    // The key of rank 0 is the job's.
    let key = records[0].1;
    Ok((records.into_iter().map(|(info, _)| info).collect(), key))
}
