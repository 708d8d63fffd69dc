//! Throughput of reductions: `cargo bench -p dl_comm_core --bench reduce [-- NAME…]`, with names of element types and of
//! operators such as `float16` and `min`; without names, of means of all types.
//!
//! One line per operator, element type, kernel, number of sources and size of a source. The result replaces the first source, as
//! in a region's slots. `GB/s` counts all bytes read and written. `copy` is that rate relative to a memcpy of the
//! source's size. `Gelem/s` counts elements of the result. Every number is from the fastest of several runs.

use std::hint::black_box;
use std::time::Instant;

use dl_comm_core::dtype::DType;
use dl_comm_core::reduce::{Kernel, ReduceOp, Reduction, Step};

/// As in a region's slots.
const ALIGN: usize = 64;
const SIZES: [(&str, usize); 3] = [("64 KiB", 64 << 10), (" 8 MiB", 8 << 20), ("64 MiB", LARGEST)];
const LARGEST: usize = 64 << 20;
const TYPES: [(DType, bool); 17] = [
    (DType::F32, false),
    (DType::BF16, false),
    (DType::F16, false),
    (DType::F64, false),
    (DType::F32, true),
    (DType::BF16, true),
    (DType::F16, true),
    (DType::I8, false),
    (DType::U8, false),
    (DType::I32, false),
    (DType::I64, false),
    (DType::I16, false),
    (DType::U16, false),
    (DType::U32, false),
    (DType::U64, false),
    (DType::Complex64, false),
    (DType::Complex128, false),
];

/// Seconds of the fastest of several runs of `work`, which moves about `bytes`.
fn fastest(bytes: usize, mut work: impl FnMut()) -> f64 {
    let repeat = ((1 << 21) / bytes).max(1);
    let run = |_| {
        let start = Instant::now();
        for _ in 0..repeat {
            work();
        }
        start.elapsed().as_secs_f64() / repeat as f64
    };
    let runs = if repeat > 1 { 60 } else { 7 };
    (0..runs).map(run).fold(f64::INFINITY, f64::min)
}

fn main() {
    // Cargo passes --bench.
    let selected: Vec<String> = std::env::args().skip(1).filter(|arg| !arg.starts_with('-')).collect();
    let is_selected = |name: &str| selected.iter().any(|selected| selected == name);
    let mut operators: Vec<ReduceOp> = ReduceOp::ALL.into_iter().filter(|op| is_selected(op.name())).collect();
    if operators.is_empty() {
        operators.push(ReduceOp::Mean);
    }
    let any_type = !DType::ALL.iter().any(|dtype| is_selected(dtype.name()));
    // As 16-bit floats these bytes are about 1, and in no type are they infinite or NaN.
    let mut memory: Vec<Vec<u8>> = (0..4).map(|index| vec![0x3c + index; LARGEST + ALIGN]).collect();
    let mut buffers: Vec<&mut [u8]> = memory
        .iter_mut()
        .map(|memory| {
            let start = memory.as_ptr().align_offset(ALIGN);
            &mut memory[start..][..LARGEST]
        })
        .collect();
    println!("operator   type       acc     kernel    sources   size   divisor     GB/s   copy  Gelem/s");
    for (name, size) in SIZES {
        let [target, source, ..] = &mut buffers[..] else { unreachable!("there are four") };
        let copied = fastest(2 * size, || black_box(&mut **target)[..size].copy_from_slice(black_box(&source[..size])));
        let copy_rate = 2.0 * size as f64 / copied;
        println!("memcpy {name:>48} {:>18.1}", copy_rate / 1e9);
        for ((dtype, acc_f64), op) in TYPES.into_iter().flat_map(|kind| operators.iter().map(move |&op| (kind, op))) {
            if !(any_type || is_selected(dtype.name())) || op.check(dtype).is_err() {
                continue;
            }
            for kernel in Kernel::available() {
                for (sources, divisor) in [(2, 2), (4, 4), (4, 3)] {
                    let reduction = Reduction { op, dtype, acc_f64, wire_is_acc: false, divisor };
                    let pointers: Vec<*const u8> = buffers.iter().take(sources).map(|buffer| buffer.as_ptr()).collect();
                    let out = buffers[0].as_mut_ptr();
                    let count = size / dtype.size();
                    let bytes = (sources + 1) * size;
                    // SAFETY: every buffer has at least `size` bytes; all bytes are valid numbers; the kernel is
                    // available.
                    let combine = || unsafe { reduction.run(kernel, Step::Combine, &pointers, &[out], count) };
                    let seconds = fastest(bytes, combine);
                    let rate = bytes as f64 / seconds;
                    println!(
                        "{:<10} {:<10} {:<7} {:<9} {sources:>7}   {name} {divisor:>7} {:>9.1} {:>6.2} {:>8.2}",
                        op.name(),
                        dtype.name(),
                        if acc_f64 { "precise" } else { "" },
                        format!("{kernel:?}"),
                        rate / 1e9,
                        rate / copy_rate,
                        count as f64 / seconds / 1e9
                    );
                }
            }
        }
    }
}
