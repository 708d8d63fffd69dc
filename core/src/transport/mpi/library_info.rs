//! Information about the MPI library for `dl_comm_describe`. MPI allows these queries before initialization and after
//! finalization.

use mpi::Threading;
use mpi::environment::{is_finalized, is_initialized, library_version, threading_support, version};
use mpi::ffi;

/// The MPI library of this process.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LibraryInfo {
    /// The text of `MPI_Get_library_version`; it starts with the vendor.
    pub library_version: String,
    /// The version of the MPI standard, such as "4.1".
    pub standard: String,
    /// Whether MPI has been initialized, by any component of the process.
    pub initialized: bool,
    /// Whether MPI has been finalized.
    pub finalized: bool,
    /// The granted thread level by its standard name; known while MPI is running.
    pub thread_level: Option<&'static str>,
    /// The address of a library function: identifies the loaded library file.
    pub symbol_address: usize,
}

/// Queries the library.
pub fn library_info() -> LibraryInfo {
    let (major, minor) = version();
    let (initialized, finalized) = (is_initialized(), is_finalized());
    let level = || match threading_support() {
        Threading::Single => "MPI_THREAD_SINGLE",
        Threading::Funneled => "MPI_THREAD_FUNNELED",
        Threading::Serialized => "MPI_THREAD_SERIALIZED",
        Threading::Multiple => "MPI_THREAD_MULTIPLE",
    };
    LibraryInfo {
        // No known library returns other text than UTF-8; report the other fields even then.
        library_version: library_version().unwrap_or_else(|error| format!("not UTF-8: {error}")),
        standard: format!("{major}.{minor}"),
        initialized,
        finalized,
        thread_level: (initialized && !finalized).then(level),
        symbol_address: ffi::MPI_Get_library_version as *const () as usize,
    }
}
