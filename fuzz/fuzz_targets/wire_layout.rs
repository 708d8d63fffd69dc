//! The wire layout: however tensors are cut into chunks and slices, every element is in one piece and one run, and pieces do
//! not overlap.
#![no_main]

use arbitrary::Arbitrary;
use dl_comm_core::dtype::DType;
use dl_comm_core::wire_layout::{ALIGN, WireLayout, slice};
use libfuzzer_sys::fuzz_target;

#[derive(Debug, Arbitrary)]
struct Input {
    tensors: Vec<(u8, u16)>,
    lines: u8,
    lanes: u8,
    hosts: u8,
    widen: u8,
}

fuzz_target!(|input: Input| {
    let dtype = |code: u8| DType::ALL[usize::from(code) % DType::ALL.len()];
    let tensors: Vec<(DType, usize)> =
        input.tensors.iter().take(64).map(|&(code, len)| (dtype(code), usize::from(len % 2048))).collect();
    let wire = |dtype: DType| (dtype.size() << (input.widen % 3)).min(8);
    let chunk = (usize::from(input.lines) + 1) * ALIGN;
    let (lanes, hosts) = (usize::from(input.lanes % 9) + 1, usize::from(input.hosts % 5) + 1);
    let plan = WireLayout::new(&tensors, wire, chunk);
    let mut seen: Vec<Vec<bool>> = tensors.iter().map(|&(_, len)| vec![false; len]).collect();
    let mut total = 0;
    for index in 0..plan.chunks() {
        let len = plan.chunk_len(index);
        assert!(len <= chunk);
        total += len;
        let mut end = 0;
        for part in
            (0..lanes).flat_map(|lane| (0..hosts).map(move |host| slice(slice(0..len, lane, lanes), host, hosts)))
        {
            let runs: Vec<_> = plan.runs(index, part.clone()).collect();
            for piece in plan.ranges(index, part.clone()) {
                let dtype = tensors[piece.tensor].0;
                assert!(piece.count > 0 && piece.offset >= end && piece.offset >= part.start);
                end = piece.offset + piece.count * wire(dtype);
                assert!(end <= part.end);
                assert!(
                    runs.iter()
                        .any(|run| { run.dtype == dtype && run.bytes.start <= piece.offset && end <= run.bytes.end })
                );
                for element in &mut seen[piece.tensor][piece.first..piece.first + piece.count] {
                    assert!(!*element, "an element is in one piece");
                    *element = true;
                }
            }
            assert!(runs.iter().all(|run| run.bytes.len().is_multiple_of(wire(run.dtype))));
        }
    }
    assert_eq!(total, plan.total());
    assert!(seen.iter().flatten().all(|&element| element), "every element is in a piece");
});
