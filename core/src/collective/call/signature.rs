//! The signature of a call: a hash of all that the ranks must agree on. Pure.

use xxhash_rust::xxh3::xxh3_64_with_seed;

use super::Call;
use crate::collective::call_config::CallConfig;
use crate::collective::counts::{Bounds, Counts};
use crate::collective::operation::{Op, Root};
use crate::error::{Error, Result};

/// The name of an absent call.
const ABSENT: &str = "\0absent";

impl Call {
    /// The contribution of a rank that has no call for a round: no data, and a signature that no call has.
    ///
    /// # Errors
    /// Those of [`Call::new`], which do not occur.
    pub fn absent(config: CallConfig) -> Result<Call> {
        Call::new(Op::BARRIER, Vec::new(), Counts::Even, ABSENT, "", String::new(), config)
    }

    /// As [`Call::absent`], of a rank that has only calls that lack their counterparts: no other rank's call matches it.
    ///
    /// # Errors
    /// As there.
    pub fn waiting(config: CallConfig) -> Result<Call> {
        let rank = config.rank as u64;
        let call = Call::absent(config)?;
        Ok(Call { signature: xxh3_64_with_seed(&rank.to_le_bytes(), call.signature), ..call })
    }

    /// Makes it match by its name, wherever the ranks make it.
    ///
    /// # Errors
    /// [`Error::Invalid`] without a name.
    pub fn into_by_name(self) -> Result<Call> {
        if self.name.is_empty() {
            return Err(Error::Invalid("a call that matches by name needs a name".into()));
        }
        let [signature, list_hash] = [self.signature, self.list_hash].map(|hash| xxh3_64_with_seed(b"by name", hash));
        Ok(Call { by_name: true, signature, list_hash, ..self })
    }

    /// Makes it the call of a rank that joins, which no other call matches.
    pub fn into_join(self) -> Call {
        Call { signature: xxh3_64_with_seed(b"join", self.signature), ..self }
    }

    /// Assigns a schedule position, on which the ranks must agree: the weight of the mean that carries over to the next
    /// call, and a text for messages.
    pub fn schedule(&mut self, carry_weight: f64, position: String) {
        if carry_weight > 0.0 {
            self.signature = xxh3_64_with_seed(&carry_weight.to_le_bytes(), self.signature);
        }
        self.schedule_position = position;
    }

    pub(super) fn hash_call(&self) -> u64 {
        // For a few numbers this is faster than a hasher with its state.
        let mut hash = 0;
        let mut number = |value: i64| hash = xxh3_64_with_seed(&value.to_le_bytes(), hash);
        number(self.config.key.hash().cast_signed());
        number(self.op.collective.code.into());
        if self.op.collective.reduces {
            number(self.op.reduce.code().into());
            if let Some((pre, post)) = self.op.reduce.factors() {
                number(pre.to_bits().cast_signed());
                number(post.to_bits().cast_signed());
            }
        }
        if self.op.collective.root != Root::None {
            number(self.op.root as i64);
        }
        number(if self.op.is_allreduce() { self.replicas.len() as i64 } else { 1 });
        for tensor in self.tensors(0) {
            number(tensor.buffer.dtype() as i64);
            // Blocks of different lengths differ in their first axis.
            let is_even = self.counts == Counts::Even;
            let shape = if is_even { tensor.shape() } else { tensor.shape().get(1..).unwrap_or_default() };
            number(shape.len() as i64);
            shape.iter().for_each(|&extent| number(extent));
        }
        match &self.counts {
            Counts::Even => {}
            Counts::Ranks(bounds) => bounds.iter().flat_map(Bounds::ends).for_each(|&end| number(end as i64)),
            Counts::Pairs { .. } => number(-1),
        }
        let hash = xxh3_64_with_seed(self.name.as_bytes(), hash);
        self.names.compared().map_or(hash, |names| xxh3_64_with_seed(names.as_bytes(), hash))
    }
}
