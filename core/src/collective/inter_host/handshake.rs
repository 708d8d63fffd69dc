//! Handshake by recursive doubling: after its rounds every host knows whether all calls match.
//!
//! Data may travel with it: whole in every round, or halved in every round and gathered again by the same rounds in
//! reverse. A host that has seen a difference reports it in all its later messages, so all hosts know after the last
//! round.

use std::ops::Range;

use super::exchange::SliceExchange;
use super::handshake_state::{HandshakeState, Payload};
use super::stage::{ExchangeStage, Next};
use super::tree::Role;
use crate::collective::partials::Partial;
use crate::error::Result;
use crate::transport::{ExchangeBuffers, HostMessage};
use crate::wire_layout::{HEADER, slice};

/// HostMessage kinds: a folded host's data, the rounds, the reverse rounds, and the result for the folded host.
const FOLD: u32 = 0;
const ROUND: u32 = 1;
const UNFOLD: u32 = 100;
const RESULT: u32 = 200;

impl SliceExchange<'_> {
    /// Sends this host's first message, unless it must receive one first.
    pub fn start_handshake(&mut self, state: &mut HandshakeState) -> Result<ExchangeStage> {
        // A folded host sends all of its data.
        let halves = state.payload == Payload::Halves && !matches!(self.tree.role, Role::FoldedInto(_));
        state.at = if halves { 0 } else { HEADER };
        if state.has_payload() {
            state.has_data = match halves {
                true => self.contribute_to_local_buffer(state.range.clone())?,
                false => self.contribute_to_send_buffer(HEADER, state.range.clone())?,
            };
        }
        let recv_range = self.recv_buffer();
        match self.tree.role {
            Role::FoldedInto(to) => {
                let message = self.write_header(FOLD, state, state.range.clone());
                self.start(
                    &[HostMessage { host: to, bytes: message }],
                    &[HostMessage { host: to, bytes: recv_range }],
                )?;
                Ok(ExchangeStage::FoldResult)
            }
            Role::FoldsIn(from) => {
                self.start(&[], &[HostMessage { host: from, bytes: recv_range }])?;
                Ok(ExchangeStage::Fold)
            }
            Role::Core => self.start_round(0, state),
        }
    }

    /// Adds the data of the folded host.
    pub fn finish_fold(&mut self, state: &mut HandshakeState) -> Result<Next> {
        let first = matches!(self.tree.role, Role::FoldsIn(other) if self.host() < other);
        self.add_received(FOLD, first, false, state)?;
        self.start_round(0, state).map(Next::ExchangeStage)
    }

    /// Adds the data of the partner of `round`. After the last round every host knows whether all calls match.
    pub fn finish_round(&mut self, round: usize, state: &mut HandshakeState) -> Result<Next> {
        let (_, first) = self.tree.partner(round);
        let is_last = round + 1 == self.tree.rounds();
        self.add_received(ROUND + round_kind(round), first, is_last, state)?;
        if !is_last {
            self.start_round(round + 1, state).map(Next::ExchangeStage)
        } else if state.has_payload() && state.payload == Payload::Halves {
            self.start_unfold(round).map(Next::ExchangeStage)
        } else {
            self.end_rounds(state)
        }
    }

    /// After the rounds: sends the result to the folded host, if there is one.
    fn end_rounds(&mut self, state: &HandshakeState) -> Result<Next> {
        let Role::FoldsIn(from) = self.tree.role else { return Ok(state.outcome()) };
        let end = match state.has_payload() {
            true => self.pack_result(0, self.slice.bytes.clone(), RESULT)?.end,
            false => HEADER,
        };
        self.write_header(RESULT, state, 0..0);
        self.start(&[HostMessage { host: from, bytes: 0..end }], &[])?;
        Ok(Next::ExchangeStage(ExchangeStage::FoldResult))
    }

    /// Receives the result on a folded host; on the other its message has gone.
    pub fn finish_fold_result(&mut self, state: &mut HandshakeState) -> Result<Next> {
        if let Role::FoldedInto(_) = self.tree.role {
            let header = self.read_header(0, RESULT)?;
            let agreed = header.agrees_with(self.slice.call);
            if agreed && state.has_payload() {
                self.unpack_result(0, self.slice.bytes.clone(), RESULT)?;
            }
            state.agreed = agreed;
        }
        Ok(state.outcome())
    }

    /// A reverse round: sends what this host had completed before `round`, for the other half.
    fn start_unfold(&mut self, round: usize) -> Result<ExchangeStage> {
        let (host, first) = self.tree.partner(round);
        let (own, received) = halves(&self.range_before(round), first);
        let message = self.pack_result(0, own, UNFOLD + round_kind(round))?;
        let recv_range = 0..HEADER + received.len();
        self.start(&[HostMessage { host, bytes: message }], &[HostMessage { host, bytes: recv_range }])?;
        Ok(ExchangeStage::Unfold(round))
    }

    /// Takes the other half of the range that this host had before `round`.
    pub fn finish_unfold(&mut self, round: usize, state: &HandshakeState) -> Result<Next> {
        let (_, first) = self.tree.partner(round);
        let (_, received) = halves(&self.range_before(round), first);
        self.unpack_result(0, received, UNFOLD + round_kind(round))?;
        match round.checked_sub(1) {
            Some(before) => self.start_unfold(before).map(Next::ExchangeStage),
            None => self.end_rounds(state),
        }
    }

    /// The range that this host still reduces before `round`, if the data is halved.
    fn range_before(&self, round: usize) -> Range<usize> {
        (0..round).fold(self.slice.bytes.clone(), |range, round| halves(&range, self.tree.partner(round).1).0)
    }

    /// Sends data to the partner of `round`: all of it, or one half, and then keeps the other half.
    fn start_round(&mut self, round: usize, state: &mut HandshakeState) -> Result<ExchangeStage> {
        let (host, first) = self.tree.partner(round);
        let mut sent = state.range.clone();
        if state.payload == Payload::Halves {
            (state.range, sent) = halves(&state.range, first);
            // The data of the lower half precedes that of the upper half.
            let upper = state.at + self.partial_bytes(if first { state.range.clone() } else { sent.clone() });
            let from = if first { upper } else { std::mem::replace(&mut state.at, upper) };
            if state.has_payload() && state.has_data {
                let len = self.partial_bytes(sent.clone());
                let ExchangeBuffers { send, partial, .. } = self.link.buffers(self.exchange_index);
                send[HEADER..HEADER + len].copy_from_slice(&partial[from..from + len]);
            }
        }
        let message = self.write_header(ROUND + round_kind(round), state, sent);
        let recv_range = self.recv_buffer();
        self.start(&[HostMessage { host, bytes: message }], &[HostMessage { host, bytes: recv_range }])?;
        Ok(ExchangeStage::Round(round))
    }

    /// Writes the header of a message whose data, the range `sent`, is already in the buffer or absent.
    fn write_header(&mut self, kind: u32, state: &HandshakeState, sent: Range<usize>) -> Range<usize> {
        let has_data = state.has_payload() && state.has_data;
        self.header(kind, state.agreed, has_data).write(self.link.buffers(self.exchange_index).send);
        0..HEADER + if has_data { self.partial_bytes(sent) } else { 0 }
    }

    /// Adds the received data to this host's. `first`: this host's data is the first operand. `last`: completes the
    /// sum.
    fn add_received(&mut self, kind: u32, first: bool, last: bool, state: &mut HandshakeState) -> Result<()> {
        let header = self.read_header(0, kind)?;
        if !header.agrees_with(self.slice.call) {
            state.agreed = false;
            return Ok(());
        }
        if !state.has_payload() {
            return Ok(());
        }
        let received = self.data(0, &header);
        let out = match state.payload {
            Payload::Halves => self.host_partial()[state.at..].as_mut_ptr(),
            _ => self.link.buffers(self.exchange_index).send[state.at..].as_mut_ptr(),
        };
        let own: Partial = state.has_data.then_some(out.cast_const());
        let (low, high) = if first { (own, received) } else { (received, own) };
        let slice = self.slice;
        // SAFETY: both operands are partial sums of this range, which this shard owns; buffers of different owners do
        // not overlap.
        unsafe {
            if last {
                slice.ops.finish_shard(&slice.part(state.range.clone()), low, high)?;
            } else {
                slice.ops.add_partials(&slice.part(state.range.clone()), low, high, out);
                state.has_data |= received.is_some();
            }
        }
        Ok(())
    }
}

/// This host's half of `range`, the lower one if `first`, and the other half.
fn halves(range: &Range<usize>, first: bool) -> (Range<usize>, Range<usize>) {
    let (low, high) = (slice(range.clone(), 0, 2), slice(range.clone(), 1, 2));
    if first { (low, high) } else { (high, low) }
}

fn round_kind(round: usize) -> u32 {
    // The number of rounds is at most the number of bits of a host number.
    u32::try_from(round).unwrap_or(u32::MAX)
}
