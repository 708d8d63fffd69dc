//! What the tests of this crate share: starting programs on several ranks.

use std::process::Command;

/// Runs `program` on `ranks` ranks through `tests/launch.py`, which kills all of it at the timeout; returns what was printed.
///
/// # Panics
/// When the launch does not succeed, with the output.
pub fn launch(ranks: usize, program: &str, arguments: &[&str]) -> String {
    let launcher = concat!(env!("CARGO_MANIFEST_DIR"), "/launch.py");
    let output = Command::new(env!("DL_COMM_TEST_PYTHON"))
        .args([launcher, &ranks.to_string(), "120", program])
        .args(arguments)
        .output();
    let output = match output {
        Ok(output) => output,
        Err(error) => panic!("cannot start {program}: {error}"),
    };
    let text = String::from_utf8_lossy(&output.stdout).into_owned() + &String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{program} on {ranks} ranks: {}\n{text}", output.status);
    text
}
