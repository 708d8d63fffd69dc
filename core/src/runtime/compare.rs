//! Comparison of buffers across ranks.

use xxhash_rust::xxh3::xxh3_64;

use super::calls::{average, broadcast, wait};
use super::state::{CONTROL, topology};
use crate::buffer::{Buffer, Tensor};
use crate::dtype::DType;
use crate::error::Result;
use crate::log::log_line;

/// Whether all ranks have the same bytes: compares hashes with those of rank 0, then combines the results of all ranks.
/// If they differ and `verbose` is set, this rank logs which of its tensors differ. Collective.
///
/// # Errors
/// [`Error::Invalid`](crate::error::Error::Invalid) for invalid memory; those of a broadcast and an allreduce, such as
/// [`Error::Mismatch`](crate::error::Error::Mismatch) if the ranks' lists differ.
///
/// # Safety
/// The memory of `tensors` is valid, and nobody writes to it during the call.
pub unsafe fn buffers_match(tensors: &[Tensor], verbose: bool) -> Result<bool> {
    let rank = topology()?.rank();
    let hash = |tensor: &Tensor| {
        // SAFETY: the caller's promise.
        xxh3_64(unsafe { tensor.buffer.bytes(0, tensor.buffer.len()) })
    };
    tensors.iter().try_for_each(|tensor| tensor.buffer.check_source())?;
    // The descriptions of the tensors must match too: they go into the call's name and so into its signature.
    let list = tensors.iter().map(Tensor::describe).collect::<Vec<_>>().join(", ");
    let shortened = &list[..list.floor_char_boundary(200)];
    let name = format!("check_buffers_match of {shortened}{}", if shortened == list { "" } else { " ..." });
    let name = if shortened == list { name } else { format!("{name} (hash {:016x})", xxh3_64(list.as_bytes())) };
    let local: Vec<u64> = tensors.iter().map(hash).collect();
    let mut root_hashes = local.clone();
    let hashes = Buffer::in_place(root_hashes.as_mut_ptr().cast(), root_hashes.len(), DType::I64);
    wait(&name, |options| broadcast(0, options, || Ok(vec![Tensor::new(hashes, &[])])))?;
    let differing: Vec<usize> = (0..local.len()).filter(|&index| local[index] != root_hashes[index]).collect();
    if verbose {
        for &index in &differing {
            log_line(&format!("tensor {index} ({}) of rank {rank} differs from rank 0's", tensors[index].describe()));
        }
    }
    let mut mismatch = [if differing.is_empty() { 0f64 } else { 1.0 }];
    let flag = Buffer::in_place(mismatch.as_mut_ptr().cast(), 1, DType::F64);
    wait(&name, |options| average(CONTROL, options, || Ok(vec![vec![Tensor::new(flag, &[])]])))?;
    Ok(mismatch[0] == 0.0)
}
