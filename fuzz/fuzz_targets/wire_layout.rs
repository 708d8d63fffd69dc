//! The wire layout: for any cut into chunks and slices, every element is in exactly one range and in a run of its type,
//! and ranges do not overlap.
#![no_main]

use arbitrary::Arbitrary;
use dl_comm_core::dtype::DType;
use dl_comm_core::wire_layout::{ALIGN, WireLayout, slice};
use libfuzzer_sys::fuzz_target;

#[derive(Debug, Arbitrary)]
struct Input {
    tensors: Vec<(u8, u16)>,
    lines: u8,
    shards: u8,
    hosts: u8,
    widen: u8,
}

fuzz_target!(|input: Input| {
    let dtype = |code: u8| DType::ALL[usize::from(code) % DType::ALL.len()];
    let tensors: Vec<(DType, usize)> =
        input.tensors.iter().take(64).map(|&(code, len)| (dtype(code), usize::from(len % 2048))).collect();
    let wire = |dtype: DType| (dtype.size() << (input.widen % 3)).min(8);
    let chunk = (usize::from(input.lines) + 1) * ALIGN;
    let (shards, hosts) = (usize::from(input.shards % 9) + 1, usize::from(input.hosts % 5) + 1);
    let layout = WireLayout::new(&tensors, wire, chunk);
    let mut seen: Vec<Vec<bool>> = tensors.iter().map(|&(_, len)| vec![false; len]).collect();
    let mut total = 0;
    for index in 0..layout.chunks() {
        let len = layout.chunk_len(index);
        assert!(len <= chunk);
        total += len;
        let mut end = 0;
        for part in
            (0..shards).flat_map(|shard| (0..hosts).map(move |host| slice(slice(0..len, shard, shards), host, hosts)))
        {
            let runs: Vec<_> = layout.runs(index, part.clone()).collect();
            for range in layout.ranges(index, part.clone()) {
                let dtype = tensors[range.tensor].0;
                assert!(range.count > 0 && range.offset >= end && range.offset >= part.start);
                end = range.offset + range.count * wire(dtype);
                assert!(end <= part.end);
                assert!(
                    runs.iter()
                        .any(|run| { run.dtype == dtype && run.bytes.start <= range.offset && end <= run.bytes.end })
                );
                for element in &mut seen[range.tensor][range.first..range.first + range.count] {
                    assert!(!*element, "an element is in one piece");
                    *element = true;
                }
            }
            assert!(runs.iter().all(|run| run.bytes.len().is_multiple_of(wire(run.dtype))));
        }
    }
    assert_eq!(total, layout.total());
    assert!(seen.iter().flatten().all(|&element| element), "every element is in a piece");
});
