//! Location of a call's tensors in GPU memory. Plain data.

/// A GPU, and the stream that orders a call's tensors: earlier work produced them, later work uses the results.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Device {
    /// The ordinal of the GPU in this process.
    pub ordinal: i32,
    /// The `CUstream` (or `cudaStream_t`) handle; 0 is the default stream.
    pub stream: usize,
    /// Whether the call blocks the host until its results are in memory, instead of making the stream wait for them.
    pub block_host: bool,
}
