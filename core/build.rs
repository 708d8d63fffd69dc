//! Generates and compiles the cxx bridge, and sets SONAME and run path of the core. For CMake, it also collects the C++
//! sources that every op library compiles into itself.

use std::path::{Path, PathBuf};
use std::{env, fs, io};

fn main() -> io::Result<()> {
    cxx_build::bridge("src/ffi.rs").include("include").std("c++17").warnings(true).compile("dl_comm_bridge");
    println!("cargo:rerun-if-changed=src/ffi.rs");
    println!("cargo:rerun-if-changed=include");
    println!("cargo:rustc-cdylib-link-arg=-Wl,-soname,libdl_comm.so.0");
    link_mpi();
    println!("cargo:rerun-if-env-changed=DL_COMM_BRIDGE_DIR");
    if let Some(folder) = env::var_os("DL_COMM_BRIDGE_DIR") {
        collect(Path::new(&folder))?;
    }
    Ok(())
}

/// Sets the search paths of libmpi. Linking uses the folder that CMake found, because the folder recorded by mpi-sys
/// may be gone. The run path has the folder of the chosen MPI, then the environment's (relative to site-packages).
/// `LD_LIBRARY_PATH` precedes both.
fn link_mpi() {
    println!("cargo:rerun-if-env-changed=DL_COMM_MPI_SEARCH");
    println!("cargo:rerun-if-env-changed=DL_COMM_MPI_RUNPATH");
    for folder in env::var("DL_COMM_MPI_SEARCH").unwrap_or_default().split(':').filter(|folder| !folder.is_empty()) {
        println!("cargo:rustc-link-search=native={folder}");
    }
    let chosen = env::var("DL_COMM_MPI_RUNPATH").unwrap_or_default();
    let runpath: Vec<&str> =
        chosen.split(':').filter(|folder| !folder.is_empty()).chain(["$ORIGIN/../../.."]).collect();
    println!("cargo:rustc-cdylib-link-arg=-Wl,--enable-new-dtags,-rpath,{}", runpath.join(":"));
}

/// Copies cxx.{h,cc} of the cxx version that the core uses, and the generated code, into `folder`.
fn collect(folder: &Path) -> io::Result<()> {
    let variable = |name: &str| {
        env::var_os(name).map(PathBuf::from).ok_or_else(|| io::Error::other(format!("cargo did not set {name}")))
    };
    let generated = variable("OUT_DIR")?.join("cxxbridge");
    let cxx_header = variable("DEP_CXXBRIDGE1_HEADER")?;
    let cxx_source = cxx_header.with_file_name("../src/cxx.cc");
    let glue = folder.join("dl_comm_core/src");
    for folder in [&folder.join("rust"), &folder.join("include"), &folder.join("src"), &glue] {
        fs::create_dir_all(folder)?;
    }
    fs::copy(&cxx_header, folder.join("rust/cxx.h"))?;
    fs::copy(&cxx_header, folder.join("include/cxx.h"))?;
    fs::copy(cxx_source, folder.join("src/cxx.cc"))?;
    fs::copy(generated.join("include/dl_comm_core/src/ffi.rs.h"), glue.join("ffi.rs.h"))?;
    fs::copy(generated.join("sources/dl_comm_core/src/ffi.rs.cc"), glue.join("ffi.rs.cc"))?;
    Ok(())
}
