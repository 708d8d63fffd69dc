//! Calls on the memory of a GPU, and the calls on host memory that carry them out.

use std::sync::Arc;

use xxhash_rust::xxh3::xxh3_64_with_seed;

use super::{Call, lengths};
use crate::buffer::{Buffer, Tensor};
use crate::collective::counts::Counts;
use crate::collective::operation::Op;
use crate::collective::selection::device_chunk_bytes;
use crate::collective::tensor_names::TensorNames;
use crate::dtype::DType;
use crate::error::{Error, Result};
use crate::transport::gpu::CallerStream;
use crate::wire_layout::{DtypeRun, WireLayout};

impl Call {
    /// Makes it a call on device memory of stream `producer`, in chunks of at most `chunk` bytes, a multiple of
    /// [`ALIGN`](crate::wire_layout::ALIGN), if it may go through the host in chunks.
    ///
    /// # Errors
    /// [`Error::Invalid`] for several towers: a process with a GPU has one.
    pub fn on_device(self, producer: Arc<CallerStream>, chunk: usize) -> Result<Call> {
        if self.replicas.len() > 1 {
            return Err(Error::Invalid(format!(
                "there are {} towers of GPU tensors; run a process for each GPU, or average the towers first",
                self.replicas.len()
            )));
        }
        // All ranks must capture it, or none.
        let kind: &[u8] = if producer.is_captured() { b"captured" } else { b"device" };
        let signature = xxh3_64_with_seed(kind, self.signature);
        if !self.op.runs_in_device_chunks() {
            return Ok(Call { signature, producer: Some(producer), ..self });
        }
        let chunk = device_chunk_bytes(self.layout.total(), self.config.channels, chunk);
        // A thread of such a call often waits for the GPU.
        let channels = self.config.channels;
        Ok(Call { layout: self.layout.with_chunk_size(chunk), channels, signature, producer: Some(producer), ..self })
    }

    /// This call, on device memory, after all that its caller has enqueued until now.
    ///
    /// # Errors
    /// [`Error::System`] of the driver.
    pub fn again_on_stream(&self) -> Result<Call> {
        let producer = self.producer.as_ref().map(|producer| producer.again().map(Arc::new)).transpose()?;
        Ok(Call { producer, ..self.clone() })
    }

    /// A call on device memory as one on copies of its tensors in host memory.
    ///
    /// # Errors
    /// Those of [`Call::new`], which do not occur for memory that is long enough.
    pub fn on_host(&self, tensors: Vec<Tensor>) -> Result<Call> {
        let (counts, names, config) = (self.counts.clone(), self.names.text().to_owned(), self.config.clone());
        let replicas = if tensors.is_empty() { Vec::new() } else { vec![tensors] };
        let call = Call::new(self.op, replicas, counts, &self.name, "", names, config)?;
        let schedule_position = self.schedule_position.clone();
        let (signature, by_name) = (self.host_signature(), self.by_name);
        Ok(Call { signature, by_name, schedule_position, pinned: true, ..call })
    }

    /// The signature of the call if it runs in host memory.
    pub(in crate::collective) fn host_signature(&self) -> u64 {
        let on_host = || xxh3_64_with_seed(b"host", self.signature);
        self.producer.as_ref().map_or(self.signature, |_| on_host())
    }

    /// The call without tensors: ranks compare it before they move data of device memory.
    pub fn without_data(&self) -> Call {
        Call {
            op: Op::BARRIER,
            layout: self.layout.empty(),
            signature: self.signature,
            list_hash: self.list_hash,
            replicas: Vec::new(),
            counts: Counts::Even,
            block_layouts: Vec::new(),
            channels: self.channels,
            limits: self.config.limits.of(Op::BARRIER),
            config: self.config.clone(),
            name: self.name.clone(),
            by_name: self.by_name,
            names: TensorNames::default(),
            schedule_position: self.schedule_position.clone(),
            producer: None,
            pinned: false,
        }
    }

    /// Chunk `chunk` of a call on device memory, as a call on host memory at `memory`.
    pub fn chunk_call(&self, chunk: usize, memory: *mut u8) -> Call {
        let run = |run: DtypeRun| {
            let count = run.bytes.len() / run.dtype.size();
            Tensor::new(Buffer::in_place(memory.wrapping_add(run.bytes.start), count, run.dtype), &[])
        };
        let len = self.layout.chunk_len(chunk);
        let tensors: Vec<Tensor> = self.layout.runs(chunk, 0..len).map(run).collect();
        let lengths = lengths(&tensors);
        let signature = xxh3_64_with_seed(&(chunk as u64).to_le_bytes(), self.signature);
        Call {
            op: self.op,
            layout: WireLayout::new(&lengths, DType::size, self.config.slot),
            signature,
            list_hash: signature,
            replicas: vec![tensors],
            counts: Counts::Even,
            block_layouts: Vec::new(),
            channels: 1,
            limits: self.limits,
            config: self.config.clone(),
            name: self.name.clone(),
            by_name: self.by_name,
            names: TensorNames::default(),
            schedule_position: String::new(),
            producer: None,
            pinned: true,
        }
    }
}
