//! The list of all environment variables, and suggestions for misspelled names. Pure.

use strsim::levenshtein;

/// Variables that dl_comm and its Python package read or set for their own processes.
pub const KNOWN: [&str; 29] = [
    "DL_COMM_ADDR",
    "DL_COMM_AFFINITY",
    "DL_COMM_ALGORITHM",
    "DL_COMM_ALONE",
    "DL_COMM_BUCKET_MB",
    "DL_COMM_CACHE",
    "DL_COMM_CHUNK_KB",
    "DL_COMM_COOLDOWN",
    "DL_COMM_DEFAULT_NTHREADS",
    "DL_COMM_DEFAULT_PREC_LEVEL",
    "DL_COMM_DUMP_DIR",
    "DL_COMM_GPU_PATH",
    "DL_COMM_HELPER_OF",
    "DL_COMM_JOB_KEY",
    "DL_COMM_LOCAL_RANK",
    "DL_COMM_MATCH_TIMEOUT_S",
    "DL_COMM_NUM_CUDA_STREAMS",
    "DL_COMM_PIPELINE_CHUNK_KB",
    "DL_COMM_RANK",
    "DL_COMM_RUN_CONFIG",
    "DL_COMM_SELECTION",
    "DL_COMM_SHM_DIR",
    "DL_COMM_SIZE",
    "DL_COMM_SOCKET_IFNAME",
    "DL_COMM_STALL_WARN_S",
    "DL_COMM_TIMELINE",
    "DL_COMM_TIMEOUT_S",
    "DL_COMM_TORCH_VARIABLES",
    "DL_COMM_VENV",
];
/// Prefix of test variables, which are not checked.
const TESTS: &str = "DL_COMM_TEST_";
/// Maximum edit distance of a suggestion.
const MAX_TYPOS: usize = 5;

/// The names that start with `DL_COMM_` but are unknown, each with the most similar known name.
pub fn unknown(names: impl IntoIterator<Item = String>) -> Vec<(String, Option<&'static str>)> {
    let ours = |name: &String| name.starts_with("DL_COMM_") && !name.starts_with(TESTS);
    let mut found: Vec<_> = names
        .into_iter()
        .filter(|name| ours(name) && !KNOWN.contains(&name.as_str()))
        .map(|name| {
            let nearest = KNOWN.into_iter().min_by_key(|known| levenshtein(&name, known));
            let nearest =
                nearest.filter(|known| levenshtein(&name, known) <= MAX_TYPOS.min(name.len().saturating_sub(8) / 2));
            (name, nearest)
        })
        .collect();
    found.sort_unstable();
    found
}

/// The warning about `unknown`, in one line; `None` if it is empty.
pub fn warning(unknown: &[(String, Option<&str>)]) -> Option<String> {
    let describe = |(name, nearest): &(String, Option<&str>)| match nearest {
        Some(nearest) => format!("{name} (is {nearest} meant?)"),
        None => name.clone(),
    };
    let texts: Vec<String> = unknown.iter().map(describe).collect();
    (!texts.is_empty()).then(|| format!("no variable of this name is known, so it has no effect: {}", texts.join(", ")))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn unknown_names_get_a_suggestion() {
        let meant = |name: &str| unknown([name.to_owned()]).pop();
        for (name, nearest) in [
            ("DL_COMM_TIMEOUT", "DL_COMM_TIMEOUT_S"),
            ("DL_COMM_TIMEUOT_S", "DL_COMM_TIMEOUT_S"),
            ("DL_COMM_SHMDIR", "DL_COMM_SHM_DIR"),
            ("DL_COMM_DEFAULT_NTHREAD", "DL_COMM_DEFAULT_NTHREADS"),
        ] {
            assert_eq!(meant(name), Some((name.to_owned(), Some(nearest))));
        }
        assert_eq!(meant("DL_COMM_QUITE_ELSE_WHERE"), Some(("DL_COMM_QUITE_ELSE_WHERE".into(), None)));
        for name in ["DL_COMM_TIMEOUT_S", "DL_COMM_TEST_ROUNDS", "PATH", "ML_COMM_X"] {
            assert_eq!(meant(name), None, "{name}");
        }
        let text = warning(&unknown(["DL_COMM_TIMEOUT".into(), "DL_COMM_QUITE_ELSE_WHERE".into()]));
        assert!(text.is_some_and(|text| {
            text.ends_with("DL_COMM_QUITE_ELSE_WHERE, DL_COMM_TIMEOUT (is DL_COMM_TIMEOUT_S meant?)")
        }));
        assert_eq!(warning(&[]), None);
    }
}
