//! The contribution of a rank that has joined to a call of the others: zeros.
//!
//! The other ranks describe the call ([`Blueprint`]), and the rank makes an equal one on memory of its own. A call on
//! device memory runs on copies in host memory then, so the rank needs no GPU.
//! Thread rule: that of [`Channel`].

use serde::{Deserialize, Serialize};

use super::call::{Call, lengths};
use super::call_config::CallConfig;
use super::channel::Channel;
use super::counts::Counts;
use super::operation::Op;
use super::value_allgather::{allgather_merge, max_value_bytes};
use crate::buffer::{Buffer, Tensor};
use crate::codec::{decode, encode};
use crate::dtype::DType;
use crate::error::{Error, Result};
use crate::reduce::ReduceOp;
use crate::transport::WaitContext;
use crate::wire_layout::ALIGN;

/// Bytes for the encoding of a part of a blueprint, beside its data.
const PART_HEADER: usize = 32;

/// What a rank must know to make a call that matches, with zeros.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Blueprint {
    collective: i32,
    reduce: ReduceOp,
    towers: usize,
    /// Types and lengths.
    tensors: Vec<(i32, usize)>,
    name: String,
    signature: u64,
}

/// Zeros of a call, and the place of its result.
pub struct Zeros(Vec<u128>);

impl Call {
    /// Whether the contribution of a rank may be zeros: sums and means, and barriers. A barrier with a name precedes
    /// something that all ranks do.
    pub fn takes_zeros(&self) -> bool {
        self.op.is_barrier() && self.name().is_empty() || self.op.is_allreduce() && self.op.reduce.adds()
    }

    fn blueprint(&self) -> Blueprint {
        Blueprint {
            collective: self.op.collective.code,
            reduce: self.op.reduce,
            towers: self.towers(),
            tensors: lengths(self.tensors(0)).into_iter().map(|(dtype, len)| (dtype as i32, len)).collect(),
            name: self.name().to_owned(),
            signature: self.host_signature(),
        }
    }
}

impl Blueprint {
    /// The call with zeros, in memory that must outlive it.
    ///
    /// # Errors
    /// [`Error::System`] if there is no memory.
    pub fn zeros(self, config: CallConfig) -> Result<(Call, Zeros)> {
        let tensors = self.tensors.iter().map(|&(code, len)| Ok((DType::from_code(code)?, len)));
        let tensors = tensors.collect::<Result<Vec<_>>>()?;
        let size = |&(dtype, len): &(DType, usize)| (len * dtype.size()).next_multiple_of(ALIGN);
        let total = tensors.iter().map(size).sum::<usize>() * self.towers;
        let words = total / size_of::<u128>();
        let mut memory: Vec<u128> = Vec::new();
        memory.try_reserve_exact(words).map_err(|_| Error::System(format!("there is no memory for {total} bytes")))?;
        memory.resize(words, 0);
        let mut at = memory.as_mut_ptr().cast::<u8>();
        let mut place = |tensor: &(DType, usize)| {
            let buffer = Buffer::in_place(at, tensor.1, tensor.0);
            at = at.wrapping_add(size(tensor));
            Tensor::new(buffer, &[])
        };
        let replicas = (0..self.towers).map(|_| tensors.iter().map(&mut place).collect()).collect();
        let op = Op::from_code(self.collective, self.reduce, 0)?;
        let mut call = Call::new(op, replicas, Counts::Even, &self.name, "", String::new(), config)?;
        call.signature = self.signature;
        Ok((call, Zeros(memory)))
    }
}

impl Zeros {
    /// The bytes of memory.
    pub fn bytes(&self) -> usize {
        self.0.len() * size_of::<u128>()
    }
}

impl Channel {
    /// Sends the blueprint of `call` to all ranks; those that have joined give none. All that do give the same.
    ///
    /// # Errors
    /// As for [`Channel::run_first_chunk`].
    pub fn share_blueprint(&mut self, call: Option<&Call>, wait_ctx: &WaitContext<'_>) -> Result<Blueprint> {
        let own = call.map(|call| encode(&call.blueprint())).transpose()?;
        let part_bytes = max_value_bytes(self).saturating_sub(PART_HEADER).max(1);
        let mut bytes: Vec<u8> = Vec::new();
        loop {
            // One rank's part is enough; those of the others are equal.
            let part = own.as_ref().map(|own| {
                let end = own.len().min(bytes.len() + part_bytes);
                (own[bytes.len()..end].to_vec(), end == own.len())
            });
            let first = |parts: Vec<Option<(Vec<u8>, bool)>>| parts.into_iter().flatten().next();
            let Some((part, last)) = allgather_merge(self, &part, wait_ctx, first)? else {
                return Err(Error::Internal("no rank has described its call".into()));
            };
            bytes.extend_from_slice(&part);
            if last {
                return decode(&bytes);
            }
        }
    }
}
