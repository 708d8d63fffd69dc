//! The TensorFlow op library through TensorFlow's C API, on 1, 2 and 3 ranks; `src/bin/tf_client.rs` is the program.
#![allow(missing_docs)]

use dl_comm_tests::launch;

#[test]
fn a_graph_built_in_c_averages() {
    for ranks in 1..=3 {
        let output = launch(ranks, env!("CARGO_BIN_EXE_tf_client"), &[env!("DL_COMM_TEST_TF_OPS")]);
        assert_eq!(output.matches("tf_client: all as expected").count(), ranks, "{output}");
    }
}
