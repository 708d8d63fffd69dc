//! The handshake of a connection between hosts, in any pieces: only the job's key identifies a host, and no other bytes
//! do harm.
#![no_main]

use dl_comm_core::transport::hello::{Caller, Hello};
use libfuzzer_sys::fuzz_target;

fuzz_target!(|input: (u128, Vec<Vec<u8>>)| {
    let (key, pieces) = input;
    let (mut hello, mut sent) = (Hello::default(), Vec::new());
    for piece in pieces {
        let rest = hello.rest();
        let count = piece.len().min(rest.len());
        rest[..count].copy_from_slice(&piece[..count]);
        sent.extend_from_slice(&piece[..count]);
        match hello.take(count, key) {
            Caller::Unknown => assert!(sent.len() < Hello::LEN),
            Caller::Stranger => assert!(sent.len() == Hello::LEN && sent[..16] != key.to_le_bytes()),
            Caller::Host(_) => assert!(sent.len() == Hello::LEN && sent[..16] == key.to_le_bytes()),
        }
    }
});
