//! What is known of launchers and MPI libraries beyond the standard: whether a process that MPI thinks alone is part of a
//! job, and what MPICH leaves behind when it is not finalised.

use std::fs;

use crate::error::{Error, Result};
use crate::say::say;

/// The variables in which launchers tell their processes how many they are, and whether that is certain: Slurm's is also set
/// in a shell in which one program is started without `srun`.
const SIZES: [(&str, bool); 3] = [("OMPI_COMM_WORLD_SIZE", true), ("PMI_SIZE", true), ("SLURM_STEP_NUM_TASKS", false)];

/// Refuses, or warns, when MPI sees one process but the launcher started several: it is another MPI's launcher, and each
/// process would train alone. `lookup` reads the environment.
pub fn check_alone(lookup: impl Fn(&str) -> Option<String>) -> Result<()> {
    for (variable, certain) in SIZES {
        let Some(size) = lookup(variable).filter(|text| text.trim().parse::<usize>().is_ok_and(|size| size > 1)) else {
            continue;
        };
        let text = format!(
            "the launcher started {size} processes ({variable}), but MPI sees only this one: the launcher is of another MPI \
             than the one that dl_comm was built with. Use the mpiexec beside the Python that has dl_comm, or build dl_comm \
             for the launcher's MPI: MPICC=/path/to/mpicc pip install ..."
        );
        if certain {
            return Err(Error::Mpi(text));
        }
        say(&text);
        return Ok(());
    }
    Ok(())
}

/// Removes the segments of shared memory that MPICH removes only in MPI_Finalize. Who has them mapped keeps them.
pub fn remove_segments() {
    let maps = fs::read_to_string("/proc/self/maps").unwrap_or_default();
    let paths = maps.lines().filter_map(|line| line.split_whitespace().last());
    for path in paths.filter(|path| path.starts_with("/dev/shm/mpich_shm_")) {
        // Another rank may have removed it before.
        let _removed = fs::remove_file(path);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn another_launcher_is_noticed() {
        let with = |name: &'static str, value: &'static str| {
            check_alone(move |asked| (asked == name).then(|| value.to_owned()))
        };
        assert!(matches!(with("OMPI_COMM_WORLD_SIZE", "2"), Err(Error::Mpi(text)) if text.contains("MPICC")));
        assert!(with("PMI_SIZE", "2").is_err());
        assert!(with("PMI_SIZE", "1").is_ok());
        assert!(with("SLURM_STEP_NUM_TASKS", "4").is_ok());
        assert!(with("HOME", "2").is_ok());
    }
}
