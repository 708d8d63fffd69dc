//! Declares the C API from its header and links the core, which CMake has built into `DL_COMM_LIB_DIR`.

use std::env;
use std::error::Error;
use std::path::PathBuf;

fn main() -> Result<(), Box<dyn Error>> {
    let header = PathBuf::from(env::var("CARGO_MANIFEST_DIR")?).join("../core/include/dl_comm.h");
    println!("cargo:rerun-if-changed={}", header.display());
    bindgen::builder()
        .header(header.to_string_lossy())
        .allowlist_item("(dl_|DL_COMM_).*")
        .generate()?
        .write_to_file(PathBuf::from(env::var("OUT_DIR")?).join("dl_comm.rs"))?;

    println!("cargo:rerun-if-env-changed=DL_COMM_LIB_DIR");
    // Without it (clippy, `cargo check`) the module is not usable, but nothing has to be linked either.
    if let Ok(folder) = env::var("DL_COMM_LIB_DIR") {
        println!("cargo:rustc-link-search=native={folder}");
        println!("cargo:rustc-link-lib=dylib=dl_comm");
        println!("cargo:rustc-cdylib-link-arg=-Wl,--enable-new-dtags,-rpath,$ORIGIN,--allow-shlib-undefined");
        println!("cargo:rerun-if-changed={folder}/libdl_comm.so.0");
    }
    Ok(())
}
