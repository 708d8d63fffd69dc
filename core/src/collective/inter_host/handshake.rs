//! Handshake by recursive doubling: after its rounds every host knows whether all calls match.
//!
//! Data may travel with it: whole in every round, or halved in every round and gathered again by the same rounds in
//! reverse. A host that has seen a difference reports it in all its later messages, so all hosts know after the last
//! round.

use std::ops::Range;

use super::exchange::SliceExchange;
use super::handshake_state::{HandshakeState, Payload};
use super::tree::Role;
use crate::collective::partials::Partial;
use crate::error::Result;
use crate::timings::Activity;
use crate::transport::Message;
use crate::wire_layout::{HEADER, slice};

/// Message kinds: a folded host's data, the rounds, the reverse rounds, and the result for the folded host.
const FOLD: u32 = 0;
const ROUND: u32 = 1;
const UNFOLD: u32 = 100;
const RESULT: u32 = 200;

impl SliceExchange<'_> {
    /// Sends this host's first message, unless it must receive one first.
    pub fn start_handshake(&mut self, payload: Payload, agreed: bool) -> Result<HandshakeState> {
        // A folded host sends all of its data.
        let halves = payload == Payload::Halves && !matches!(self.tree.role, Role::FoldedInto(_));
        let at = if halves { 0 } else { HEADER };
        let mut state = HandshakeState { payload, agreed, range: self.slice.bytes.clone(), at, has_data: false };
        if state.has_payload() {
            state.has_data = match halves {
                true => self.contribute_to_local_buffer(state.range.clone()),
                false => self.contribute_to_send_buffer(HEADER, state.range.clone()),
            };
        }
        let recv_range = self.recv_buffer();
        match self.tree.role {
            Role::FoldedInto(to) => {
                let message = self.write_header(FOLD, &state, state.range.clone());
                self.start(&[Message { host: to, bytes: message }], &[Message { host: to, bytes: recv_range }])?;
            }
            Role::FoldsIn(from) => self.start(&[], &[Message { host: from, bytes: recv_range }])?,
            Role::Core => self.start_round(0, &mut state)?,
        }
        Ok(state)
    }

    /// Runs the rounds. Returns false if the hosts' calls differ; otherwise the slice is complete if it was the
    /// payload.
    pub fn finish_handshake(&mut self, mut state: HandshakeState) -> Result<bool> {
        if let Role::FoldedInto(_) = self.tree.role {
            return self.finish_fold(&state);
        }
        if let Role::FoldsIn(_) = self.tree.role {
            self.finish()?;
            self.add_received(FOLD, true, false, &mut state)?;
            self.start_round(0, &mut state)?;
        }
        let rounds = self.tree.rounds();
        // The range of this host before each round.
        let mut ranges = vec![self.slice.bytes.clone()];
        for round in 0..rounds {
            self.finish()?;
            let (_, first) = self.tree.partner(round);
            let last = round + 1 == rounds;
            self.add_received(ROUND + round_kind(round), first, last, &mut state)?;
            if !last {
                ranges.push(state.range.clone());
                self.start_round(round + 1, &mut state)?;
            }
        }
        if state.has_payload() && state.payload == Payload::Halves {
            self.all_gather(&ranges)?;
        }
        if let Role::FoldsIn(from) = self.tree.role {
            let message = match state.has_payload() {
                true => self.pack_result(0, self.slice.bytes.clone(), RESULT),
                false => self.write_header(RESULT, &state, 0..0),
            };
            self.start(&[Message { host: from, bytes: message }], &[])?;
            self.finish()?;
        }
        Ok(state.agreed)
    }

    /// Receives the result on a folded host.
    fn finish_fold(&mut self, state: &HandshakeState) -> Result<bool> {
        self.finish()?;
        let agreed = self.read(0, RESULT)?.is_some();
        if agreed && state.has_payload() {
            self.unpack_result(0, self.slice.bytes.clone(), RESULT)?;
        }
        Ok(agreed)
    }

    /// Sends data to the partner of `round`: all of it, or one half, and then keeps the other half.
    fn start_round(&mut self, round: usize, state: &mut HandshakeState) -> Result<()> {
        let (host, first) = self.tree.partner(round);
        let mut sent = state.range.clone();
        if state.payload == Payload::Halves {
            (state.range, sent) = halves(&state.range, first);
            // The data of the lower half precedes that of the upper half.
            let upper = state.at + self.partial_bytes(if first { state.range.clone() } else { sent.clone() });
            let from = if first { upper } else { std::mem::replace(&mut state.at, upper) };
            if state.has_payload() && state.has_data {
                let len = self.partial_bytes(sent.clone());
                let SliceExchange { link, host_partial: own, exchange_index, .. } = self;
                link.buffers(*exchange_index).send[HEADER..HEADER + len]
                    .copy_from_slice(&own.as_slice()[from..from + len]);
            }
        }
        let message = self.write_header(ROUND + round_kind(round), state, sent);
        let recv_range = self.recv_buffer();
        self.start(&[Message { host, bytes: message }], &[Message { host, bytes: recv_range }])
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
        let Some(received) = self.read(0, kind)? else {
            state.agreed = false;
            return Ok(());
        };
        if !state.has_payload() {
            return Ok(());
        }
        let out = match state.payload {
            Payload::Halves => self.host_partial.as_mut_slice()[state.at..].as_mut_ptr(),
            _ => self.link.buffers(self.exchange_index).send[state.at..].as_mut_ptr(),
        };
        let own: Partial = state.has_data.then_some(out.cast_const());
        let (low, high) = if first { (own, received) } else { (received, own) };
        let slice = self.slice;
        // SAFETY: both operands are partial sums of this range, which this shard owns; buffers of different owners do
        // not overlap.
        unsafe {
            if last {
                slice.ops.finish_shard(&slice.part(state.range.clone()), low, high);
            } else {
                slice.ops.add_partials(&slice.part(state.range.clone()), low, high, out);
                state.has_data |= received.is_some();
            }
        }
        self.timer.end(Activity::Reduce);
        Ok(())
    }

    /// Reverse rounds: before round r this host had `ranges[r]`, and its partner completed the other half.
    fn all_gather(&mut self, ranges: &[Range<usize>]) -> Result<()> {
        for round in (0..self.tree.rounds()).rev() {
            let (host, first) = self.tree.partner(round);
            let (own, received) = halves(&ranges[round], first);
            let message = self.pack_result(0, own, UNFOLD + round_kind(round));
            let recv_range = 0..HEADER + received.len();
            self.start(&[Message { host, bytes: message }], &[Message { host, bytes: recv_range }])?;
            self.finish()?;
            self.unpack_result(0, received, UNFOLD + round_kind(round))?;
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
