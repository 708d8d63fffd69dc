//! Launcher and MPI library specifics outside the MPI standard: detects a job in which MPI sees one process only,
//! identifies the launcher, and removes segments that MPICH leaves without MPI_Finalize.

use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use xxhash_rust::xxh3::xxh3_64;

use crate::error::{Error, Result};
use crate::log::log_line;

/// The variables in which launchers store the number of processes, each with the launcher's name. Slurm and torchrun
/// need further checks.
const SIZES: [(&str, &str); 8] = [
    ("OMPI_COMM_WORLD_SIZE", "Open MPI's mpirun"),
    ("PMI_SIZE", "a launcher that speaks PMI"),
    ("PALS_SIZE", "Cray's PALS"),
    ("MV2_COMM_WORLD_SIZE", "MVAPICH's mpirun_rsh"),
    ("MPI_LOCALNRANKS", "an mpiexec of MPICH's kind"),
    ("JSM_NAMESPACE_SIZE", "jsrun"),
    ("FLUX_JOB_SIZE", "Flux"),
    ("SLURM_STEP_NUM_TASKS", "srun"),
];
/// Variables of a rank and of the number of ranks.
const POSITIONS: [(&str, &str); 6] = [
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    ("PALS_RANKID", "PALS_SIZE"),
    ("PMI_RANK", "PMI_SIZE"),
    ("MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE"),
    ("PMIX_RANK", "SLURM_STEP_NUM_TASKS"),
    ("PMIX_RANK", "SLURM_NTASKS"),
];
/// Prefix of MPICH's segment names.
const SEGMENT: &str = "mpich_shm_";
/// Minimum age of a stale segment.
const STALE_AGE: Duration = Duration::from_secs(3600);
/// Slurm uses step ids from here on for batch scripts and shells of `salloc`, which are not parallel steps.
const SLURM_NO_STEP: u64 = 0xffff_fff0;
/// Variables that identify the launcher's job and rank. Their values differ in processes of another launcher.
const IDENTITY: &str = "PMI_RANK PMI_SIZE PMI_FD PMI_PORT PMIX_RANK PMIX_NAMESPACE OMPI_COMM_WORLD_RANK PALS_APID
    PALS_RANKID MV2_COMM_WORLD_RANK JSM_NAMESPACE_RANK FLUX_JOB_ID FLUX_TASK_RANK SLURM_JOB_ID SLURM_STEP_ID
    SLURM_PROCID PBS_JOBID LSB_JOBID TORCHELASTIC_RUN_ID DL_COMM_RANK DL_COMM_SIZE DL_COMM_ADDR JOB_COMPLETION_INDEX";
/// Those of torchrun, whose jobs may all have the same id. Elsewhere, programs set them for their own purposes.
const TORCHRUN_IDENTITY: [&str; 3] = ["RANK", "MASTER_PORT", "TORCHELASTIC_RESTART_COUNT"];
/// Variables with the connection to the launcher's process manager; valid in one process only.
const CONNECTION: &str = "PMI_RANK PMI_SIZE PMI_FD PMI_PORT PMI_ID PMI_JOBID PMI_KVS PMI_DOMAIN PMI_SPAWNED
    PMI_HOSTNAME PMI_CONTROL_PORT PMI_CONTROL_FD PMI_SHARED_SECRET PMI2_FD PMI2_RANK HYDI_CONTROL_FD";

/// Fails when MPI sees one process but the launcher started several: each would train alone. `lookup` reads the
/// environment.
///
/// # Errors
/// [`Error::Network`] with a remedy.
pub fn check_single_rank(lookup: impl Fn(&str) -> Option<String>) -> Result<()> {
    let number = |name: &str| lookup(name).and_then(|text| text.trim().parse::<u64>().ok());
    let several = |name: &str| number(name).filter(|&size| size > 1);
    let single_rank_hint = "Where one process is what you want, set DL_COMM_ALONE=1";
    let torchrun = lookup("TORCHELASTIC_RUN_ID").is_some();
    if let Some(size) = several("WORLD_SIZE").filter(|_| torchrun || number("RANK").is_some()) {
        let (launcher, remedy) = if torchrun {
            ("torchrun", "Python programs start by torchrun's store in dl_comm.init(), others by dl_comm_init_store()")
        } else {
            ("something that sets RANK and WORLD_SIZE", "Pass the numbers to dl_comm.init(rank=, size=, address=)")
        };
        return Err(Error::Network(format!(
            "{launcher} started {size} processes, but MPI sees only this one: each would train alone. {remedy}; or start \
             them with torchrun, dl-comm-run -n {size}, the mpiexec beside the Python that has dl_comm, or srun. \
             {single_rank_hint}"
        )));
    }
    let in_step = number("SLURM_STEP_ID").is_some_and(|step| step < SLURM_NO_STEP);
    // Without a step id, the process is a batch script (task 0) or one of several tasks.
    let later_task = number("SLURM_PROCID").is_some_and(|task| task > 0);
    let detected = SIZES.iter().find_map(|&(name, launcher)| {
        let size = several(name)?;
        (launcher != "srun" || in_step || later_task).then_some((name, launcher, size))
    });
    let detected = detected.or_else(|| {
        let size = several("SLURM_NTASKS").filter(|_| later_task || (in_step && number("SLURM_PROCID").is_some()))?;
        // A step of one task in a larger job was requested by the user.
        (number("SLURM_STEP_NUM_TASKS") != Some(1)).then_some(("SLURM_NTASKS", "srun", size))
    });
    if let Some((name, launcher, size)) = detected {
        return Err(Error::Network(format!(
            "{launcher} started {size} processes ({name}), but MPI sees only this one: each would train alone, since the launcher \
             is of another MPI than the one that dl_comm was built with, or was not asked to bring MPI up (srun --mpi=pmi2 or \
             pmix does). Use dl-comm-run or the mpiexec beside the Python that has dl_comm, or build dl_comm for the \
             launcher's MPI: MPICC=/path/to/mpicc pip install ... {single_rank_hint}"
        )));
    }
    if let Some(index) = lookup("JOB_COMPLETION_INDEX") {
        log_line(&format!(
            "this process has index {index} of a job of Kubernetes (JOB_COMPLETION_INDEX) and is alone, because DL_COMM_SIZE \
             and DL_COMM_ADDR are not set (DL_COMM_ALONE=1 silences this)"
        ));
    }
    if let Some(size) = several("SLURM_NTASKS").filter(|_| number("SLURM_STEP_NUM_TASKS") != Some(1)) {
        log_line(&format!(
            "the Slurm job has {size} tasks, but this process was started without srun and is alone: srun python ..., or \
             dl-comm-run python ..., starts all of them (DL_COMM_ALONE=1 silences this)"
        ));
    }
    Ok(())
}

/// Whether a launcher started this process.
pub fn launched(lookup: impl Fn(&str) -> Option<String>) -> bool {
    ["PMI_RANK", "PMIX_RANK", "OMPI_COMM_WORLD_RANK", "PALS_RANKID"].iter().any(|name| lookup(name).is_some())
}

/// Whether a launcher has started this process as rank and size `me`, and can start the MPI library with the text
/// `version` in it.
pub fn starts_as(me: (usize, usize), version: &str, lookup: impl Fn(&str) -> Option<String> + Copy) -> bool {
    let number = |name: &str| lookup(name)?.trim().parse::<usize>().ok();
    let is_open_mpi = version.contains("Open MPI");
    let is_usable = |rank: &str| match rank {
        "OMPI_COMM_WORLD_RANK" => is_open_mpi,
        "PMIX_RANK" => is_open_mpi || version.to_ascii_lowercase().contains("pmix"),
        "PALS_RANKID" => true,
        _ => !is_open_mpi,
    };
    let known = POSITIONS.iter().filter(|(rank, _)| is_usable(rank));
    let position = known.filter_map(|(rank, size)| Some((number(rank)?, number(size)?))).next();
    // The variables of torchrun's agent have its number of agents, which may be that of the ranks.
    position == Some(me) && torchrun_position(lookup) != Some(me) && check_connection(lookup).is_ok()
}

/// The rank and the number of ranks that torchrun gives this process.
pub fn torchrun_position(lookup: impl Fn(&str) -> Option<String>) -> Option<(usize, usize)> {
    let number = |name: &str| lookup(name)?.trim().parse::<usize>().ok();
    lookup("TORCHELASTIC_RUN_ID")?;
    Some((number("RANK")?, number("WORLD_SIZE")?))
}

/// The values of torchrun's variables, in the order of `python/dl_comm/_job/torchrun.py`; empty texts elsewhere.
pub fn torchrun_identity(lookup: impl Fn(&str) -> Option<String>) -> Vec<String> {
    let names = ["TORCHELASTIC_RUN_ID"].into_iter().chain(TORCHRUN_IDENTITY);
    names.map(|name| lookup(name).unwrap_or_default()).collect()
}

/// A hash of the launcher's variables; differs between launchers.
pub fn identity(lookup: impl Fn(&str) -> Option<String>) -> u64 {
    let torchrun = TORCHRUN_IDENTITY.into_iter().filter(|_| lookup("TORCHELASTIC_RUN_ID").is_some());
    let names = IDENTITY.split_whitespace().chain(torchrun);
    let values: Vec<String> = names.map(|name| lookup(name).unwrap_or_default()).collect();
    xxh3_64(values.join("\n").as_bytes())
}

/// The names of the set variables that connect this process to its launcher.
pub fn connection() -> Vec<String> {
    let names = std::env::vars_os().filter_map(|(name, _)| name.into_string().ok());
    let ours = |name: &String| {
        CONNECTION.split_whitespace().any(|known| known == name)
            || (name.starts_with("PMIX_") && !name.starts_with("PMIX_MCA_"))
    };
    names.filter(ours).collect()
}

/// Removes the launcher's connection from the environment.
pub fn leave_launcher() {
    for name in connection() {
        // SAFETY: no other thread accesses the environment: MPI's start, just before or after this call, changes it
        // too.
        unsafe { std::env::remove_var(name) };
    }
}

/// Whether a descriptor is a connected stream socket, as that of a launcher is. A process that has inherited only the
/// number may have something else there, such as a file, into which MPI would write.
fn is_connection(descriptor: i32) -> bool {
    let (mut kind, mut length) = (0, 0);
    // SAFETY: sizes and pointers are those of the variables, whose contents are not used (`addr` of length 0).
    unsafe {
        let mut kind_length = size_of::<libc::c_int>() as libc::socklen_t;
        let has_kind = libc::getsockopt(
            descriptor,
            libc::SOL_SOCKET,
            libc::SO_TYPE,
            (&raw mut kind).cast::<libc::c_void>(),
            &raw mut kind_length,
        ) == 0;
        let mut address: libc::sockaddr = std::mem::zeroed();
        has_kind && kind == libc::SOCK_STREAM && libc::getpeername(descriptor, &raw mut address, &raw mut length) == 0
    }
}

/// Checks that the descriptor of the launcher connection is one; otherwise MPI would abort or wait.
///
/// # Errors
/// [`Error::State`] with a remedy.
pub fn check_connection(lookup: impl Fn(&str) -> Option<String>) -> Result<()> {
    let Some(number) = lookup("PMI_FD").and_then(|text| text.trim().parse::<i32>().ok()) else { return Ok(()) };
    if is_connection(number) {
        return Ok(());
    }
    Err(Error::State(
        "this process has the variables of a rank (PMI_FD), but not its connection to the launcher: a rank has started it \
         before dl_comm was up there. It is a helper: call dl_comm in the rank itself, or set DL_COMM_ALONE=1 here"
            .into(),
    ))
}

/// Removes stale MPICH segments in `folder`: old, owned by this user, and mapped by no visible process. Processes in
/// other containers are not visible, but they have mapped their segments long before the minimum age and keep the
/// mappings.
pub fn reclaim_segments(folder: &Path) {
    let me = rustix::process::geteuid().as_raw();
    let stale = |entry: &fs::DirEntry| {
        let metadata = entry.metadata().ok().filter(|metadata| metadata.is_file() && metadata.uid() == me)?;
        let old = metadata.modified().ok()?.elapsed().ok()? > STALE_AGE;
        (old && entry.file_name().to_str()?.starts_with(SEGMENT)).then(|| entry.path())
    };
    let stale_paths: Vec<PathBuf> =
        fs::read_dir(folder).into_iter().flatten().flatten().filter_map(|entry| stale(&entry)).collect();
    if stale_paths.is_empty() {
        return;
    }
    let processes = fs::read_dir("/proc").into_iter().flatten().flatten();
    let maps: Vec<String> =
        processes.filter_map(|process| fs::read_to_string(process.path().join("maps")).ok()).collect();
    for path in stale_paths {
        let name = path.to_string_lossy();
        if !maps.iter().any(|maps| maps.contains(&*name)) {
            // Another process may have removed it already.
            let _removed = fs::remove_file(&path);
        }
    }
}

/// Removes MPICH's segments of this job, which MPICH itself removes only in MPI_Finalize. Existing mappings stay valid.
pub fn remove_segments() {
    let maps = fs::read_to_string("/proc/self/maps").unwrap_or_default();
    let paths = maps.lines().filter_map(|line| line.split_whitespace().last());
    for path in paths.filter(|path| path.starts_with(&format!("/dev/shm/{SEGMENT}"))) {
        // Another rank may have removed it already.
        let _removed = fs::remove_file(path);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::fd::AsRawFd;
    use std::os::unix::net::UnixStream;

    fn with(set: &[(&str, &str)]) -> Result<()> {
        check_single_rank(|asked| set.iter().find(|(name, _)| *name == asked).map(|(_, value)| (*value).to_owned()))
    }

    #[test]
    fn an_unusable_launcher_is_refused() {
        for size in ["OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "PALS_SIZE", "MV2_COMM_WORLD_SIZE", "MPI_LOCALNRANKS"] {
            let text = with(&[(size, "2")]).unwrap_err().to_string();
            assert!(text.contains("MPICC") && text.contains(size) && text.contains("DL_COMM_ALONE=1"), "{text}");
            assert!(with(&[(size, "1")]).is_ok());
        }
        assert!(with(&[("HOME", "2")]).is_ok());
    }

    #[test]
    fn torchrun_is_refused_where_its_store_was_not_used() {
        let torchrun = [("TORCHELASTIC_RUN_ID", "none"), ("WORLD_SIZE", "4"), ("RANK", "1")];
        let text = with(&torchrun).unwrap_err().to_string();
        assert!(text.contains("torchrun started 4") && text.contains("dl_comm_init_store"), "{text}");
        assert!(with(&torchrun[1..]).unwrap_err().to_string().contains("RANK and WORLD_SIZE"));
        assert!(with(&[("WORLD_SIZE", "4")]).is_ok(), "a name that scripts use for other things");
        assert!(with(&[("WORLD_SIZE", "1"), ("RANK", "0")]).is_ok());
    }

    #[test]
    fn the_numbers_of_torchrun_identify_only_its_processes() {
        let of = |set: &[(&str, &str)]| {
            let lookup = |asked: &str| set.iter().find(|entry| entry.0 == asked).map(|entry| entry.1.to_owned());
            (torchrun_position(lookup), identity(lookup))
        };
        let (id, rank, size) = (("TORCHELASTIC_RUN_ID", "none"), ("RANK", "1"), ("WORLD_SIZE", "4"));
        assert_eq!(of(&[id, rank, size]).0, Some((1, 4)));
        assert_eq!(of(&[rank, size]).0, None);
        assert_ne!(of(&[id, rank, size]).1, of(&[id, ("RANK", "0"), size]).1, "a torchrun that a rank starts");
        assert_eq!(of(&[rank, size]).1, of(&[]).1, "a program sets them for another library");
    }

    #[test]
    fn a_launcher_starts_the_libraries_that_know_it() {
        let starts = |version: &str, set: &[(&str, &str)]| {
            let lookup = |asked: &str| set.iter().find(|entry| entry.0 == asked).map(|entry| entry.1.to_owned());
            starts_as((1, 4), version, lookup)
        };
        let (mpich, with_pmix, open_mpi) = ("MPICH 5", "MPICH 5\nconfigure: --with-pmix=/usr", "Open MPI v5");
        let pmi = [("PMI_RANK", "1"), ("PMI_SIZE", "4")];
        assert!(starts(mpich, &pmi) && !starts(open_mpi, &pmi));
        assert!(!starts(mpich, &[pmi[0], ("PMI_SIZE", "2")]), "srun of a torchrun");
        assert!(!starts(mpich, &[pmi[0], pmi[1], ("PMI_FD", "1000000")]));
        let torchrun = [("TORCHELASTIC_RUN_ID", "none"), ("RANK", "1"), ("WORLD_SIZE", "4")];
        assert!(!starts(mpich, &[&pmi[..], &torchrun].concat()), "an agent for each rank");
        let pmix = [("PMIX_RANK", "1"), ("SLURM_NTASKS", "4")];
        assert!(!starts(mpich, &pmix) && starts(with_pmix, &pmix) && starts(open_mpi, &pmix));
    }

    #[test]
    fn slurm_steps_are_distinguished_from_shells() {
        let (many, first, second) = (("SLURM_NTASKS", "4"), ("SLURM_PROCID", "0"), ("SLURM_PROCID", "1"));
        let (tasks, step) = (("SLURM_STEP_NUM_TASKS", "4"), ("SLURM_STEP_ID", "0"));
        for step in [&[many, first, tasks, step][..], &[many, second], &[many, first, step], &[tasks, second]] {
            assert!(with(step).unwrap_err().to_string().contains("srun started 4"), "{step:?}");
        }
        let interactive = ("SLURM_STEP_ID", "4294967290");
        let one = ("SLURM_STEP_NUM_TASKS", "1");
        // A shell of salloc; a batch script; a salloc shell in a step of its own; srun -n 1 in a job of 4.
        for shell in [&[many][..], &[many, first], &[many, first, interactive, tasks], &[many, first, step, one]] {
            assert_eq!(with(shell), Ok(()), "{shell:?}");
        }
    }

    #[test]
    fn unmapped_stale_segments_are_removed() {
        let base = tempfile::tempdir().unwrap();
        let folder = base.path();
        let old = std::time::SystemTime::now() - STALE_AGE * 2;
        let create = |name: &str| {
            let file = fs::File::options().create_new(true).read(true).write(true).open(folder.join(name)).unwrap();
            file.set_len(4096).unwrap();
            file
        };
        let mapped = create("mpich_shm_mapped");
        create("mpich_shm_young");
        for file in [&mapped, &create("mpich_shm_left"), &create("other")] {
            file.set_modified(old).unwrap();
        }
        let map = memmap2::MmapRaw::map_raw(&mapped).unwrap();
        reclaim_segments(folder);
        let exists = |name: &str| folder.join(name).exists();
        assert!(!exists("mpich_shm_left"));
        assert!(["mpich_shm_mapped", "mpich_shm_young", "other"].into_iter().all(exists));
        drop(map);
    }

    #[test]
    fn a_missing_connection_is_detected() {
        let fd = |number: i32| check_connection(move |name| (name == "PMI_FD").then(|| number.to_string()));
        let (launcher, rank) = UnixStream::pair().unwrap();
        assert!(check_connection(|_| None).is_ok());
        assert_eq!(fd(rank.as_raw_fd()), Ok(()));
        drop(launcher);
        let file = tempfile::tempfile().unwrap();
        let listening = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let datagrams = std::os::unix::net::UnixDatagram::pair().unwrap();
        for other in [1_000_000, -1, file.as_raw_fd(), listening.as_raw_fd(), datagrams.0.as_raw_fd()] {
            assert!(matches!(fd(other), Err(Error::State(text)) if text.contains("helper")), "{other}");
        }
    }
}
