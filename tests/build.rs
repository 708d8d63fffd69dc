//! Builds test programs in C with the top-level CMakeLists.txt, against the installed package, and the fake CUDA driver.
//! Generates bindings of TensorFlow's C API. `DL_COMM_TEST_PYTHON` is the interpreter that has the package;
//! `tests/run.sh` sets it.

use std::env;
use std::error::Error;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

fn main() -> Result<(), Box<dyn Error>> {
    for variable in ["DL_COMM_TEST_PYTHON", "DL_COMM_CACHE"] {
        println!("cargo:rerun-if-env-changed={variable}");
    }
    for source in [
        "../CMakeLists.txt",
        "../tests/c",
        "fake_cuda",
        "fake_cuda_env.py",
        "rust/cuda_host_kernels.cc",
        "../core/src/transport/cuda/kernels",
        "../core/include",
        "../examples/c_average",
    ] {
        println!("cargo:rerun-if-changed={source}");
    }
    // Outside of OUT_DIR, of which each of cargo test and cargo clippy has its own: the second builds nothing anew.
    let native = PathBuf::from(env::var("OUT_DIR")?)
        .ancestors()
        .nth(3)
        .ok_or("OUT_DIR is not in a target folder")?
        .join("dl_comm_tests_native");
    fs::create_dir_all(&native)?;
    let python = env::var("DL_COMM_TEST_PYTHON")
        .map_err(|_| "set DL_COMM_TEST_PYTHON to a Python that has dl_comm installed, as tests/run.sh does")?;
    let package = ask(&python, "import dl_comm._base.paths as p; print(p.PACKAGE)")?;
    let tensorflow =
        ask(&python, "import importlib.util as u; print(u.find_spec('tensorflow').submodule_search_locations[0])")?;
    println!("cargo:rerun-if-changed={package}/libdl_comm.so.0");

    // The library that Python programs use, from the cache; compiled if it is not there yet.
    let answer = output(Command::new(&python).args(["-m", "dl_comm.build", "tensorflow"]))?;
    let tf_ops = answer.strip_prefix("tensorflow: ").ok_or_else(|| format!("no library in {answer:?}"))?.to_owned();

    let common = |config: &mut cmake::Config| {
        config.profile("Release").define("Python_EXECUTABLE", &python);
    };
    let mut driver = cmake::Config::new("..");
    common(&mut driver);
    let install_dir = driver
        .out_dir(native.join("c"))
        .define("DL_COMM_CORE_LIBRARY", format!("{package}/libdl_comm.so.0"))
        .define("DL_COMM_BRIDGE_DIR", format!("{package}/_src/bridge"))
        .define("CMAKE_INSTALL_RPATH", &package)
        .define("DL_COMM_WITH_TORCH", "OFF")
        .define("DL_COMM_WITH_C10D", "OFF")
        .define("DL_COMM_WITH_TF", "OFF")
        .define("DL_COMM_WITH_C_TESTS", "ON")
        .build();
    let mut example = cmake::Config::new("../examples/c_average");
    common(&mut example);
    let example = example
        .out_dir(native.join("c_average"))
        .define("dl_comm_DIR", format!("{package}/cmake"))
        .build_target("all")
        .build();

    bind_tensorflow(Path::new(&tensorflow))?;
    for (name, value) in [
        ("PYTHON", python.clone()),
        ("TF_OPS", tf_ops),
        ("FAKE_CUDA", build_fake_cuda(&python)?),
        ("NINE_FUNCTIONS", format!("{}/nine_functions", install_dir.display())),
        ("COLLECTIVES", format!("{}/collectives", install_dir.display())),
        ("GROUPS", format!("{}/groups", install_dir.display())),
        ("COLLECTIVES_CXX", format!("{}/collectives_cxx", install_dir.display())),
        ("P2P", format!("{}/p2p", install_dir.display())),
        ("PARAMETER_SERVER", format!("{}/parameter_server", install_dir.display())),
        ("PARAMETER_SERVER_CXX", format!("{}/parameter_server_cxx", install_dir.display())),
        ("P2P_CXX", format!("{}/p2p_cxx", install_dir.display())),
        ("C_AVERAGE", format!("{}/build/average", example.display())),
        ("PKG_CONFIG_DIR", format!("{package}/pkgconfig")),
    ] {
        println!("cargo:rustc-env=DL_COMM_TEST_{name}={value}");
    }
    // The test binary for TensorFlow's C API needs run paths to TensorFlow and the core.
    for folder in [&tensorflow, &package] {
        println!("cargo:rustc-link-search=native={folder}");
        println!("cargo:rustc-link-arg-bins=-Wl,-rpath,{folder},--allow-shlib-undefined");
    }
    Ok(())
}

/// Builds the fake CUDA driver, whose folder it returns, and what `rust/cuda_kernels.rs` links: the kernels of the driver, and
/// how to launch them.
fn build_fake_cuda(python: &str) -> Result<String, Box<dyn Error>> {
    let folder = output(Command::new(python).arg("fake_cuda_env.py"))?;
    cc::Build::new()
        .cpp(true)
        .std("c++17")
        .include("fake_cuda")
        .file("rust/cuda_host_kernels.cc")
        .warnings(true)
        .warnings_into_errors(true)
        .cargo_metadata(false)
        .try_compile("dl_comm_host_kernels")?;
    for folder in [&env::var("OUT_DIR")?, &folder] {
        println!("cargo:rustc-link-search=native={folder}");
    }
    Ok(folder)
}

fn ask(python: &str, question: &str) -> Result<String, Box<dyn Error>> {
    output(Command::new(python).args(["-c", question]))
}

/// What a program prints.
fn output(command: &mut Command) -> Result<String, Box<dyn Error>> {
    let answer = command.output()?;
    if !answer.status.success() {
        return Err(format!("{command:?}: {}", String::from_utf8_lossy(&answer.stderr)).into());
    }
    Ok(String::from_utf8(answer.stdout)?.trim().to_owned())
}

fn bind_tensorflow(tensorflow: &Path) -> Result<(), Box<dyn Error>> {
    let include = tensorflow.join("include");
    bindgen::builder()
        .header(include.join("tensorflow/c/c_api.h").to_string_lossy())
        .clang_arg(format!("-I{}", include.display()))
        .allowlist_function("TF_.*")
        .layout_tests(false)
        .generate()?
        .write_to_file(PathBuf::from(env::var("OUT_DIR")?).join("tensorflow.rs"))?;
    let entries: Vec<String> =
        fs::read_dir(tensorflow)?.filter_map(|entry| entry.ok()?.file_name().into_string().ok()).collect();
    for stem in ["libtensorflow_cc.so.", "libtensorflow_framework.so."] {
        let library = entries.iter().find(|name| name.starts_with(stem));
        println!("cargo:rustc-link-arg-bins=-l:{}", library.ok_or(format!("this TensorFlow has no {stem}N"))?);
    }
    println!("cargo:rustc-link-arg-bins=-l:libdl_comm.so.0");
    Ok(())
}
