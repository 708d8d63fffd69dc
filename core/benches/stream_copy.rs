//! Where `stream_copy` pays against memcpy: `cargo bench -p dl_comm_core --bench stream_copy`.
//!
//! 512 MiB are copied in pieces, from and to the pieces of large arrays in turn (which are then in no cache) or always the
//! same piece. Numbers are GB/s of the copied bytes, memcpy and `stream_copy`, each of the fastest of several runs.

use std::hint::black_box;
use std::ptr;
use std::time::Instant;

use dl_comm_core::stream_copy::stream_copy;

const TOTAL: usize = 512 << 20;
const LINE: usize = 64;

/// Seconds for copying all in pieces; `steps` are 0 where it is always the same piece.
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
        // SAFETY: both have so many bytes, and are of different arrays.
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
