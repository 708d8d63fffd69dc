//! The names of the environment variables: the one list of them, and what is meant by a name that is not in it. Pure.

/// Those that dl_comm reads, here and in its Python package, and those that it sets for its own processes.
pub const KNOWN: [&str; 22] = [
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
    "DL_COMM_MATCH_TIMEOUT_S",
    "DL_COMM_NUM_CUDA_STREAMS",
    "DL_COMM_PIPELINE_CHUNK_KB",
    "DL_COMM_RUN_CONFIG",
    "DL_COMM_SHM_DIR",
    "DL_COMM_SOCKET_IFNAME",
    "DL_COMM_STALL_WARN_S",
    "DL_COMM_TIMELINE",
    "DL_COMM_TIMEOUT_S",
    "DL_COMM_VENV",
];
/// Of the tests, which have many.
const TESTS: &str = "DL_COMM_TEST_";
/// How many letters of a name may be wrong for it to stand for another one.
const MAX_TYPOS: usize = 5;

/// The names in `names` that begin as dl_comm's do and are none of them, and for each the one that is likely meant.
pub fn unknown(names: impl IntoIterator<Item = String>) -> Vec<(String, Option<&'static str>)> {
    let ours = |name: &String| name.starts_with("DL_COMM_") && !name.starts_with(TESTS);
    let mut found: Vec<_> = names
        .into_iter()
        .filter(|name| ours(name) && !KNOWN.contains(&name.as_str()))
        .map(|name| {
            let nearest = KNOWN.into_iter().min_by_key(|known| edit_distance(&name, known));
            let nearest =
                nearest.filter(|known| edit_distance(&name, known) <= MAX_TYPOS.min(name.len().saturating_sub(8) / 2));
            (name, nearest)
        })
        .collect();
    found.sort_unstable();
    found
}

/// What to say of these, in one line; nothing when there are none.
pub fn warning(unknown: &[(String, Option<&str>)]) -> Option<String> {
    let word = |(name, nearest): &(String, Option<&str>)| match nearest {
        Some(nearest) => format!("{name} (is {nearest} meant?)"),
        None => name.clone(),
    };
    let words: Vec<String> = unknown.iter().map(word).collect();
    (!words.is_empty()).then(|| format!("no variable of this name is known, so it has no effect: {}", words.join(", ")))
}

/// The number of letters to insert, remove or replace to make `b` of `a` (Levenshtein's distance).
fn edit_distance(a: &str, b: &str) -> usize {
    let mut row: Vec<usize> = (0..=b.len()).collect();
    for (i, x) in a.bytes().enumerate() {
        let mut corner = row[0];
        row[0] = i + 1;
        for (j, y) in b.bytes().enumerate() {
            let replaced = corner + usize::from(x != y);
            corner = row[j + 1];
            row[j + 1] = replaced.min(corner + 1).min(row[j] + 1);
        }
    }
    row[b.len()]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_that_is_not_known_has_a_neighbour() {
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
        assert_eq!((edit_distance("", "abc"), edit_distance("kitten", "sitting"), edit_distance("a", "a")), (3, 3, 0));
        let text = warning(&unknown(["DL_COMM_TIMEOUT".into(), "DL_COMM_QUITE_ELSE_WHERE".into()]));
        assert!(text.is_some_and(|text| {
            text.ends_with("DL_COMM_QUITE_ELSE_WHERE, DL_COMM_TIMEOUT (is DL_COMM_TIMEOUT_S meant?)")
        }));
        assert_eq!(warning(&[]), None);
    }
}
