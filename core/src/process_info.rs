//! A JSON description of this process: versions, library files and settings, and after init also ranks and teams. Used
//! by `python -m dl_comm.doctor`, bug reports, and C programs that log it.
//!
//! Thread rule: any thread, any time; blocks while another thread runs init.

use std::fs;
use std::time::Duration;

use serde_json::{Value, json};

use crate::affinity::Affinity;
use crate::collective::CallConfig;
use crate::collective::device::DeviceSettings;
use crate::config::{Config, DumpDir};
use crate::error::Result;
use crate::plugin::Cooldown;
use crate::runtime::{self, ProcessInfo};
use crate::transport::bootstrap::Exchanges;
use crate::transport::launcher::{NAME, library_info};
use crate::transport::rank_info::RankInfo;
use crate::transport::{NetworkModel, RegionLayout};
use crate::variables;

/// The JSON object that `dl_comm.h` describes.
///
/// # Errors
/// [`crate::error::Error::State`] in a forked child.
pub fn process_info() -> Result<String> {
    let overview = runtime::overview()?;
    let maps = fs::read_to_string("/proc/self/maps").unwrap_or_default();
    let library = library_info();
    // Before init: the settings that init would read now.
    let settings = overview.config.clone().map_or_else(Config::from_env, Ok);
    let mut info = json!({
        "version": env!("CARGO_PKG_VERSION"),
        "library": file_at(&maps, process_info as *const () as usize),
        NAME: library,
        "state": overview.state,
        "launcher": runtime::rank_info().ok().map(|position| position.launcher),
    });
    info[NAME]["library"] = json!(file_at(&maps, library.symbol_address));
    let names = std::env::vars_os().filter_map(|(name, _)| name.into_string().ok());
    info["variables"] = json!(variables::KNOWN);
    info["unknown_variables"] = variables::unknown(names).into_iter().collect();
    info["group_bytes"] = group_bytes(settings.as_ref().unwrap_or(&Config::default()));
    match settings {
        Ok(settings) => info["settings"] = by_variable(&settings),
        Err(error) => info["settings_error"] = Value::String(error.to_string()),
    }
    if let Some(topology) = &overview.topology {
        info["rank"] = json!(topology.rank());
        info["size"] = json!(topology.size());
        info["hosts"] = json!(topology.hosts());
        info["local_rank"] = json!(topology.local_rank());
        info["local_size"] = json!(topology.local_size());
        info["ranks"] = ranks(&overview);
        if let Some(NetworkModel { latency_s: latency, message_gap_s: message, byte_s: byte }) = overview.network {
            info["network"] = json!({"latency_s": latency, "per_message_s": message, "per_byte_s": byte});
        }
        if overview.state == "started" {
            let Exchanges { allreduces, allgathers, bytes } = overview.exchanges;
            info["exchanges"] = json!({"allreduces": allreduces, "allgathers": allgathers, "bytes": bytes});
        }
        let shards = topology.num_shards();
        info["teams"] = overview.teams.iter().map(|(config, gpus)| team(config, gpus.as_ref(), shards)).collect();
    }
    Ok(info.to_string())
}

/// Every rank's host and process; empty after the world has ended.
fn ranks(overview: &ProcessInfo) -> Value {
    let entry = |(rank, entry): (usize, &RankInfo)| {
        let position = overview.topology.as_ref().and_then(|topology| topology.position(rank));
        let mut entry = json!(entry);
        entry["rank"] = json!(rank);
        entry["host_index"] = json!(position.map(|position| position.host));
        entry["local_rank"] = json!(position.map(|position| position.local_rank));
        entry
    };
    overview.rank_info.iter().enumerate().map(entry).collect()
}

fn team(config: &CallConfig, gpus: Option<&Value>, shards: usize) -> Value {
    json!({
        "id": config.key.number(),
        "threads": config.channels,
        "prec_level": i32::from(config.acc_f64),
        "slot_bytes": config.slot,
        "shards": shards,
        "gpu": gpus,
    })
}

/// The shared memory of a group with the default threads on a host with 1, 2, 4, ... ranks.
fn group_bytes(config: &Config) -> Value {
    let bytes = |ranks| RegionLayout::bytes_on_one_host(ranks, config.default_nthreads, config.chunk_bytes);
    (0..10).map(|power| bytes(1 << power)).collect()
}

/// The settings by the names and in the units of their environment variables. The destructuring makes a forgotten new
/// field a compile error.
fn by_variable(config: &Config) -> Value {
    let Config {
        default_nthreads,
        default_prec_level,
        timeout,
        stall_warn,
        match_timeout: match_within,
        chunk_bytes,
        algorithm,
        selection,
        affinity,
        cooldown,
        // Each rank has its own.
        local_rank: _,
        alone,
        shm_dir,
        interface: network,
        dump_dir,
        timeline,
        device: DeviceSettings { path, chunk, streams },
    } = config;
    let seconds = |limit: &Option<Duration>| json!(limit.map_or(0.0, |limit| limit.as_secs_f64()));
    let affinity = match affinity {
        Affinity::None => "none".to_owned(),
        Affinity::Auto => "auto".to_owned(),
        Affinity::List(list) => list.iter().map(usize::to_string).collect::<Vec<_>>().join(","),
    };
    let cooldown = match cooldown {
        Cooldown::After => "after",
        Cooldown::Last => "last",
    };
    let dump_dir = match dump_dir {
        DumpDir::Temporary => "",
        DumpDir::Folder(folder) => folder,
        DumpDir::Disabled => "none",
    };
    json!({
        "DL_COMM_DEFAULT_NTHREADS": default_nthreads,
        "DL_COMM_DEFAULT_PREC_LEVEL": default_prec_level,
        "DL_COMM_TIMEOUT_S": seconds(timeout),
        "DL_COMM_STALL_WARN_S": seconds(stall_warn),
        "DL_COMM_MATCH_TIMEOUT_S": match_within.as_secs_f64(),
        "DL_COMM_CHUNK_KB": chunk_bytes.map(|bytes| bytes >> 10),
        "DL_COMM_ALGORITHM": algorithm.name(),
        "DL_COMM_SELECTION": selection.text(),
        "DL_COMM_AFFINITY": affinity,
        "DL_COMM_COOLDOWN": cooldown,
        "DL_COMM_ALONE": i32::from(*alone),
        "DL_COMM_SHM_DIR": shm_dir,
        "DL_COMM_SOCKET_IFNAME": network,
        "DL_COMM_DUMP_DIR": dump_dir,
        "DL_COMM_TIMELINE": timeline,
        "DL_COMM_GPU_PATH": path.name(),
        "DL_COMM_PIPELINE_CHUNK_KB": chunk >> 10,
        "DL_COMM_NUM_CUDA_STREAMS": streams,
    })
}

/// The file mapped at `address`, from the text of `/proc/self/maps` (proc_pid_maps(5)).
fn file_at(maps: &str, address: usize) -> Option<&str> {
    maps.lines().find_map(|line| {
        let (range, rest) = line.split_once(' ')?;
        let (first, end) = range.split_once('-')?;
        let range = usize::from_str_radix(first, 16).ok()?..usize::from_str_radix(end, 16).ok()?;
        // Permissions, offset, device and inode precede the path; the path may contain spaces.
        range.contains(&address).then_some(rest).and_then(|rest| rest.find('/').map(|start| &rest[start..]))
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::collective::Selection;
    use crate::collective::selection::Limit;

    #[test]
    fn before_init_it_tells_of_the_libraries_and_the_settings() {
        let report: Value = serde_json::from_str(&process_info().unwrap()).unwrap();
        assert_eq!(report["state"], "not_started");
        assert_eq!(report["version"], env!("CARGO_PKG_VERSION"));
        let standard = report[NAME]["standard"].as_str().unwrap();
        assert!(standard.split_once('.').unwrap().0.parse::<u32>().unwrap() >= 3, "{standard}");
        assert!(!report[NAME]["library_version"].as_str().unwrap().is_empty());
        assert!(report[NAME]["library"].as_str().unwrap().contains("libmpi"), "{report}");
        assert_eq!(report[NAME]["thread_level"], Value::Null);
        assert!(report["library"].as_str().unwrap().starts_with('/'), "{report}");
        assert!(report.get("ranks").is_none());
    }

    #[test]
    fn a_group_takes_its_slots_and_its_flags() {
        let bytes = |config: Config| -> Vec<u64> { serde_json::from_value(group_bytes(&config)).unwrap() };
        let defaults = bytes(Config { default_nthreads: 2, ..Config::default() });
        assert_eq!(
            defaults.iter().map(|bytes| bytes >> 20).collect::<Vec<_>>(),
            [4, 8, 8, 8, 16, 32, 64, 128, 256, 513]
        );
        let set = bytes(Config { default_nthreads: 3, chunk_bytes: Some(64 << 10), ..Config::default() });
        assert!((2 * 3 * 4 * (64 << 10)..3 << 20).contains(&set[1]), "{set:?}");
    }

    #[test]
    fn settings_have_the_units_of_their_variables() {
        let info = by_variable(&Config {
            timeout: None,
            stall_warn: Some(Duration::from_millis(500)),
            chunk_bytes: Some(64 << 10),
            selection: Selection::default().with(Limit::IpcOneShot, 1),
            affinity: Affinity::List(vec![1, 3]),
            ..Config::default()
        });
        assert_eq!(info["DL_COMM_TIMEOUT_S"], 0.0);
        assert_eq!(info["DL_COMM_STALL_WARN_S"], 0.5);
        assert_eq!(info["DL_COMM_CHUNK_KB"], 64);
        assert_eq!(info["DL_COMM_SELECTION"], "ipc.one_shot=1");
        assert_eq!(info["DL_COMM_AFFINITY"], "1,3");
        assert_eq!(info["DL_COMM_SHM_DIR"], "/dev/shm");
        // The reported values can be parsed again.
        let text = |value: &Value| value.as_str().map_or_else(|| value.to_string(), str::to_owned);
        let parsed = Config::from_lookup(|name| info.get(name).map(text)).unwrap();
        assert_eq!(by_variable(&parsed), info);
    }

    #[test]
    fn addresses_are_found_in_the_maps() {
        let maps = "1000-2000 r-xp 00000000 fe:01 42     /lib/a b.so\n2000-3000 rw-p 00000000 00:00 0\n";
        assert_eq!(file_at(maps, 0x1fff), Some("/lib/a b.so"));
        assert_eq!(file_at(maps, 0x2000), None);
        assert_eq!(file_at(maps, 0x5000), None);
    }
}
