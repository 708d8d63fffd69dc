//! Compares `stream_copy` with memcpy: `cargo bench -p dl_comm_core --bench stream_copy`.
//!
//! Copies 512 MiB in pieces. A source or target either moves through a large array, so it is in no cache, or is always
//! the same piece. Numbers are GB/s of copied bytes for memcpy and `stream_copy`, each from the fastest of several
//! runs.

use std::hint::black_box;
use std::ptr;
use std::time::Instant;

use dl_comm_core::stream_copy::stream_copy;

const TOTAL: usize = 512 << 20;
const LINE: usize = 64;

/// Seconds for copying everything in pieces; a step of 0 always uses the same piece.
fn copied(
    copy: unsafe fn(*const u8, *mut u8, usize),
    (src, dst): (&[u8], &mut [u8]),
    piece: usize,
    steps: (usize, usize),
) -> f64 {
    let start = Instant::now();
    for index in 0..TOTAL / piece {
        let src = &src[index * steps.0..][..piece];
        let dst = &mut dst[index * steps.1..][..piece];
        // SAFETY: both have at least `piece` bytes, and are parts of different arrays.
        unsafe { black_box(copy)(src.as_ptr(), dst.as_mut_ptr(), piece) };
    }
    start.elapsed().as_secs_f64()
}

fn main() {
    let (src, mut dst) = (vec![1u8; TOTAL + LINE], vec![2u8; TOTAL + LINE]);
    let src = &src[src.as_ptr().align_offset(LINE)..];
    let start = dst.as_ptr().align_offset(LINE);
    let dst = &mut dst[start..];
    println!("     piece   nothing in a cache         the source              the target");
    for log in [16, 18, 20, 22, 24, 26] {
        let piece = 1 << log;
        print!("{:>6} KiB", piece >> 10);
        for steps in [(piece, piece), (0, piece), (piece, 0)] {
            let mut fastest = [f64::INFINITY; 2];
            for _ in 0..7 {
                for (fastest, copy) in fastest.iter_mut().zip([ptr::copy_nonoverlapping::<u8>, stream_copy]) {
                    *fastest = fastest.min(copied(copy, (src, dst), piece, steps));
                }
            }
            let [plain, stream] = fastest.map(|seconds| TOTAL as f64 / seconds / 1e9);
            print!("   {plain:>6.1} {stream:>6.1} ({:>4.2}x)", stream / plain);
        }
        println!();
    }
}
