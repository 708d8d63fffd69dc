//! Calls of the C API before `dl_comm_init` (first inputs) and after `dl_comm_finalize` (all later inputs): every
//! collective fails.
#![no_main]

mod calls;

use std::sync::atomic::{AtomicU32, Ordering};

use calls::Call;
use dl_comm_core::capi;
use libfuzzer_sys::fuzz_target;

/// Number of inputs before `dl_comm_init`.
const INPUTS_BEFORE_INIT: u32 = 20_000;

static INPUTS: AtomicU32 = AtomicU32::new(0);

fuzz_target!(|list: Vec<Call>| {
    let input = INPUTS.fetch_add(1, Ordering::Relaxed);
    if input == INPUTS_BEFORE_INIT {
        assert_eq!((capi::dl_comm_init(), capi::dl_comm_finalize()), (0, 0), "{}", calls::last_error());
    }
    let local = |call: &Call| matches!(call, Call::Timeline(..) | Call::Release(..) | Call::Numbers);
    // Another start succeeds: of a job that the other target has.
    for call in list.iter().filter(|call| !matches!(call, Call::Init)) {
        calls::make(std::slice::from_ref(call));
        assert!(local(call) || call.make() < 0, "{call:?}");
    }
    assert_eq!(capi::dl_comm_is_initialized(), 0);
});
