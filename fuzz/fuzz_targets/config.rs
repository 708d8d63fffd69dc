//! Any environment gives settings or an error that names a variable, and CPU assignments are valid.
#![no_main]

use arbitrary::Arbitrary;
use dl_comm_core::affinity::{Affinity, GroupPlacement, assign_cpus};
use dl_comm_core::collective::Selection;
use dl_comm_core::config::Config;
use libfuzzer_sys::fuzz_target;

const NAMES: [&str; 19] = [
    "DL_COMM_DEFAULT_NTHREADS",
    "DL_COMM_DEFAULT_PREC_LEVEL",
    "DL_COMM_TIMEOUT_S",
    "DL_COMM_STALL_WARN_S",
    "DL_COMM_MATCH_TIMEOUT_S",
    "DL_COMM_CHUNK_KB",
    "DL_COMM_AFFINITY",
    "DL_COMM_COOLDOWN",
    "DL_COMM_SHM_DIR",
    "DL_COMM_SOCKET_IFNAME",
    "DL_COMM_DUMP_DIR",
    "DL_COMM_TIMELINE",
    "DL_COMM_ALGORITHM",
    "DL_COMM_LOCAL_RANK",
    "DL_COMM_ALONE",
    "DL_COMM_GPU_PATH",
    "DL_COMM_PIPELINE_CHUNK_KB",
    "DL_COMM_NUM_CUDA_STREAMS",
    "DL_COMM_SELECTION",
];

#[derive(Debug, Arbitrary)]
struct Input {
    values: [Option<String>; NAMES.len()],
    cpus: u8,
    local_size: u8,
    local_rank: u8,
    team: u8,
    threads: u8,
    bound: bool,
}

fuzz_target!(|input: Input| {
    let lookup = |name: &str| input.values[NAMES.iter().position(|&known| known == name)?].clone();
    match Config::from_lookup(lookup) {
        Err(error) => assert!(NAMES.iter().any(|name| error.to_string().contains(name)), "{error}"),
        Ok(config) => {
            assert!((1..=256).contains(&config.default_nthreads) && config.default_prec_level <= 1);
            assert_eq!(Selection::parse(&config.selection.text()), Ok(config.selection));
            assert!(config.chunk_bytes.is_none_or(|bytes| bytes >= 4096));
            assert!(config.timeout.is_none_or(|timeout| timeout.as_secs() <= 1_000_000_000));
        }
    }
    let local_size = usize::from(input.local_size).max(1);
    let (team, threads) = (usize::from(input.team % 64), usize::from(input.threads).max(1));
    let placement =
        GroupPlacement { local_rank: usize::from(input.local_rank) % local_size, local_size, team, threads };
    let allowed: Vec<usize> = (0..usize::from(input.cpus).max(1)).collect();
    let online = allowed.len() + usize::from(input.bound);
    let affinity = input.values[6].as_deref().map_or(Ok(Affinity::Auto), Affinity::parse);
    if let Ok(Ok(Some(cpus))) = affinity.map(|affinity| assign_cpus(&affinity, placement, &allowed, online)) {
        assert_eq!(cpus.len(), threads);
        assert!(cpus.iter().all(|processor| allowed.contains(processor)));
    }
});
