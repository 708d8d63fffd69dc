//! The C API used from C on 1, 2 and 3 ranks, and two ways to build a program with it.
#![allow(missing_docs, clippy::expect_used)]

use std::process::Command;

use dl_comm_core::cases::wants_all;
use dl_comm_tests::launch;

/// Runs a program on 1, 2 and 3 ranks as C99, and on 2 as C++11; with all cases on as many.
fn in_c_and_cxx(c: &str, cxx: &str) {
    for ranks in 1..=3 {
        launch(ranks, c, &[]);
        if ranks == 2 || wants_all() {
            launch(ranks, cxx, &[]);
        }
    }
}

#[test]
fn the_nine_functions_and_more() {
    for ranks in 1..=3 {
        launch(ranks, env!("DL_COMM_TEST_NINE_FUNCTIONS"), &[]);
    }
}

#[test]
fn every_collective() {
    in_c_and_cxx(env!("DL_COMM_TEST_COLLECTIVES"), env!("DL_COMM_TEST_COLLECTIVES_CXX"));
}

#[test]
fn groups_of_some_ranks() {
    for ranks in 1..=4 {
        launch(ranks, env!("DL_COMM_TEST_GROUPS"), &[]);
    }
}

#[test]
fn send_and_receive() {
    in_c_and_cxx(env!("DL_COMM_TEST_P2P"), env!("DL_COMM_TEST_P2P_CXX"));
}

#[test]
fn parameter_server() {
    in_c_and_cxx(env!("DL_COMM_TEST_PARAMETER_SERVER"), env!("DL_COMM_TEST_PARAMETER_SERVER_CXX"));
}

/// `build.rs` builds the example with `find_package(dl_comm)`.
#[test]
fn the_example_runs() {
    for ranks in 1..=3 {
        let output = launch(ranks, env!("DL_COMM_TEST_C_AVERAGE"), &[]);
        let mean = (2 * ranks - 1) as f32 / 2.0;
        assert_eq!(output.trim(), format!("mean over {ranks} processes and 2 towers: {mean}"));
    }
}

#[test]
fn a_program_without_a_launcher_is_rank_0_of_1() {
    let output = Command::new(env!("DL_COMM_TEST_C_AVERAGE")).output().expect("the example starts");
    assert_eq!(String::from_utf8_lossy(&output.stdout).trim(), "mean over 1 processes and 2 towers: 0.5");
}

/// Builds the example with the flags of the pkg-config file. Parses the file itself, because pkg-config may be missing.
#[test]
fn the_pkg_config_file_builds_a_program() {
    let folder = env!("DL_COMM_TEST_PKG_CONFIG_DIR");
    let file = std::fs::read_to_string(format!("{folder}/dl_comm.pc")).expect("the package has a pkg-config file");
    let flags = |key: &str| -> Vec<String> {
        let line = file.lines().find_map(|line| line.strip_prefix(key)).expect("the line is there");
        let line = line
            .replace("${libdir}", &format!("{folder}/.."))
            .replace("${includedir}", &format!("{folder}/../include"));
        line.split_whitespace().map(str::to_owned).collect()
    };
    let program = std::env::temp_dir().join(format!("dl_comm_pc_{}", std::process::id()));
    let source = concat!(env!("CARGO_MANIFEST_DIR"), "/../examples/c_average/average.c");
    let built = Command::new("cc")
        .args(flags("Cflags:"))
        .args([source, "-o", &program.to_string_lossy()])
        .args(flags("Libs:"))
        .output()
        .expect("cc starts");
    assert!(built.status.success(), "{}", String::from_utf8_lossy(&built.stderr));
    launch(2, &program.to_string_lossy(), &[]);
    std::fs::remove_file(program).expect("the program is there");
}
