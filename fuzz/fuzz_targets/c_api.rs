//! Calls of the C API in a process that is rank 0 of 1: any arguments give a result or an error, and a barrier works
//! afterwards.
#![no_main]

mod calls;

use std::sync::Once;

use calls::Call;
use dl_comm_core::capi;
use libfuzzer_sys::fuzz_target;

static INIT: Once = Once::new();

fuzz_target!(|list: Vec<Call>| {
    INIT.call_once(|| assert_eq!(capi::dl_comm_init(), 0, "{}", calls::last_error()));
    calls::make(&list);
    assert_eq!(capi::dl_comm_barrier(), 0, "{}", calls::last_error());
});
