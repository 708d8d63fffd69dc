//! Where a call's tensors are when they are not in host memory. Plain data.

/// A GPU, and the stream on which a call's tensors were made and will be used.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Device {
    /// The number of the GPU in this process, from 0.
    pub ordinal: i32,
    /// The driver's handle of the stream (a `CUstream`, which a `cudaStream_t` is); 0 for the default one.
    pub stream: usize,
    /// Whether the call ends when the results are there, instead of when the stream will see them: then the stream goes on
    /// meanwhile.
    pub block_host: bool,
}
