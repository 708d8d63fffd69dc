//! What the MPI library says about itself, for `dl_comm_describe`: MPI allows these questions before it is up and after its end.

use mpi::Threading;
use mpi::environment::{is_finalized, is_initialized, library_version, threading_support, version};
use mpi::ffi;

/// The MPI library of this process.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LibraryInfo {
    /// The text of `MPI_Get_library_version`; its first line, or first words, tell the vendor.
    pub library_version: String,
    /// The version of the MPI standard, "4.1" say.
    pub standard: String,
    /// Whether MPI was brought up, by whomever, and whether it has ended again.
    pub initialized: bool,
    /// See `initialized`.
    pub finalized: bool,
    /// What MPI grants to threads, as the standard names it; known while MPI is up.
    pub thread_level: Option<&'static str>,
    /// The address of one of the library's functions: in the file that holds it, the library was loaded.
    pub symbol_address: usize,
}

/// Asks the library.
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
        // A library whose text is not UTF-8 has not been met; its other answers are still worth telling.
        library_version: library_version().unwrap_or_else(|error| format!("not UTF-8: {error}")),
        standard: format!("{major}.{minor}"),
        initialized,
        finalized,
        thread_level: (initialized && !finalized).then(level),
        symbol_address: ffi::MPI_Get_library_version as *const () as usize,
    }
}
