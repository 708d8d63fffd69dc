//! The hosts meet by recursive doubling: after its rounds every host knows whether all called the same. Data may ride along,
//! whole in every round, or in halves of halves, which the same rounds backwards bring together again.
//!
//! A host that differs from another one says so in all its later messages, so that after the last round all know.

use std::ops::Range;

use super::exchange::SliceExchange;
use super::handshake_state::{HandshakeState, Payload};
use super::tree::Role;
use crate::collective::phases::Partial;
use crate::error::Result;
use crate::timings::Activity;
use crate::transport::Message;
use crate::wire_layout::{HEADER, slice};

/// The stages of a meeting: the part of a host that gives way, the rounds, the rounds backwards, and the result for the host
/// that gave way.
const FOLD: u32 = 0;
const ROUND: u32 = 1;
const UNFOLD: u32 = 100;
const RESULT: u32 = 200;

impl SliceExchange<'_> {
    /// Sends the first message, where this host has one to send before one comes.
    pub fn start_handshake(&mut self, freight: Payload, agreed: bool) -> Result<HandshakeState> {
        // A host that gives way sends all it has.
        let halves = freight == Payload::Halves && !matches!(self.tree.role, Role::FoldedInto(_));
        let at = if halves { 0 } else { HEADER };
        let mut load =
            HandshakeState { payload: freight, agreed, range: self.slice.bytes.clone(), at, has_data: false };
        if load.has_payload() {
            load.has_data = match halves {
                true => self.contribute_to_own(load.range.clone()),
                false => self.contribute_to_out(HEADER, load.range.clone()),
            };
        }
        let room = self.recv_buffer();
        match self.tree.role {
            Role::FoldedInto(to) => {
                let message = self.write_header(FOLD, &load, load.range.clone());
                self.start(&[Message { host: to, bytes: message }], &[Message { host: to, bytes: room }])?;
            }
            Role::FoldsIn(from) => self.start(&[], &[Message { host: from, bytes: room }])?,
            Role::Core => self.start_round(0, &mut load)?,
        }
        Ok(load)
    }

    /// Goes through the rounds; false when the hosts differ, else, with freight, the slice is complete.
    pub fn finish_handshake(&mut self, mut load: HandshakeState) -> Result<bool> {
        if let Role::FoldedInto(_) = self.tree.role {
            return self.finish_fold(&load);
        }
        if let Role::FoldsIn(_) = self.tree.role {
            self.finish()?;
            self.add_received(FOLD, true, false, &mut load)?;
            self.start_round(0, &mut load)?;
        }
        let rounds = self.tree.rounds();
        // What this host had before each round.
        let mut ranges = vec![self.slice.bytes.clone()];
        for round in 0..rounds {
            self.finish()?;
            let (_, first) = self.tree.partner(round);
            let last = round + 1 == rounds;
            self.add_received(ROUND + round_kind(round), first, last, &mut load)?;
            if !last {
                ranges.push(load.range.clone());
                self.start_round(round + 1, &mut load)?;
            }
        }
        if load.has_payload() && load.payload == Payload::Halves {
            self.gather(&ranges)?;
        }
        if let Role::FoldsIn(from) = self.tree.role {
            let message = match load.has_payload() {
                true => self.pack_result(0, self.slice.bytes.clone(), RESULT),
                false => self.write_header(RESULT, &load, 0..0),
            };
            self.start(&[Message { host: from, bytes: message }], &[])?;
            self.finish()?;
        }
        Ok(load.agreed)
    }

    /// The result, for a host that gave way.
    fn finish_fold(&mut self, load: &HandshakeState) -> Result<bool> {
        self.finish()?;
        let agreed = self.read(0, RESULT)?.is_some();
        if agreed && load.has_payload() {
            self.unpack_result(0, self.slice.bytes.clone(), RESULT)?;
        }
        Ok(agreed)
    }

    /// Sends this host's part to its partner of `round`: all of it, or one half, and is then left with the other.
    fn start_round(&mut self, round: usize, load: &mut HandshakeState) -> Result<()> {
        let (host, first) = self.tree.partner(round);
        let mut sent = load.range.clone();
        if load.payload == Payload::Halves {
            (load.range, sent) = halves(&load.range, first);
            // The lower half's part lies before that of the upper one.
            let upper = load.at + self.carried(if first { load.range.clone() } else { sent.clone() });
            let from = if first { upper } else { std::mem::replace(&mut load.at, upper) };
            if load.has_payload() && load.has_data {
                let len = self.carried(sent.clone());
                let SliceExchange { link, host_partial: own, turn, .. } = self;
                link.buffers(*turn).send[HEADER..HEADER + len].copy_from_slice(&own.as_slice()[from..from + len]);
            }
        }
        let message = self.write_header(ROUND + round_kind(round), load, sent);
        let room = self.recv_buffer();
        self.start(&[Message { host, bytes: message }], &[Message { host, bytes: room }])
    }

    /// Writes the header of a message whose content, `sent` of the slice, is in its place already, or not there.
    fn write_header(&mut self, kind: u32, load: &HandshakeState, sent: Range<usize>) -> Range<usize> {
        let holds = load.has_payload() && load.has_data;
        self.header(kind, load.agreed, holds).write(self.link.buffers(self.turn).send);
        0..HEADER + if holds { self.carried(sent) } else { 0 }
    }

    /// Adds what has come to this host's part, `first` telling whether that comes before the other; the `last` time the sum
    /// is finished.
    fn add_received(&mut self, kind: u32, first: bool, last: bool, load: &mut HandshakeState) -> Result<()> {
        let Some(theirs) = self.read(0, kind)? else {
            load.agreed = false;
            return Ok(());
        };
        if !load.has_payload() {
            return Ok(());
        }
        let place = match load.payload {
            Payload::Halves => self.host_partial.as_mut_slice()[load.at..].as_mut_ptr(),
            _ => self.link.buffers(self.turn).send[load.at..].as_mut_ptr(),
        };
        let mine: Partial = load.has_data.then_some(place.cast_const());
        let (low, high) = if first { (mine, theirs) } else { (theirs, mine) };
        let (collective, call, shard) = (self.slice.collective, self.slice.call, &self.slice.shard);
        // SAFETY: both parts were contributed to that range, which is this shard's; memory of different owners does not
        // overlap.
        unsafe {
            if last {
                collective.finish_shard(call, shard, load.range.clone(), low, high);
            } else {
                collective.add_partials(call, shard, load.range.clone(), low, high, place);
                load.has_data |= theirs.is_some();
            }
        }
        self.timer.end(Activity::Reduce);
        Ok(())
    }

    /// The rounds backwards: before round r this host had `ranges[r]`, of which its partner has the other half.
    fn gather(&mut self, ranges: &[Range<usize>]) -> Result<()> {
        for round in (0..self.tree.rounds()).rev() {
            let (host, first) = self.tree.partner(round);
            let (mine, theirs) = halves(&ranges[round], first);
            let message = self.pack_result(0, mine, UNFOLD + round_kind(round));
            let room = 0..HEADER + theirs.len();
            self.start(&[Message { host, bytes: message }], &[Message { host, bytes: room }])?;
            self.finish()?;
            self.unpack_result(0, theirs, UNFOLD + round_kind(round))?;
        }
        Ok(())
    }
}

/// This host's half of `range`, the lower one if it comes `first`, and the other.
fn halves(range: &Range<usize>, first: bool) -> (Range<usize>, Range<usize>) {
    let (low, high) = (slice(range.clone(), 0, 2), slice(range.clone(), 1, 2));
    if first { (low, high) } else { (high, low) }
}

fn round_kind(round: usize) -> u32 {
    // There are no more rounds than bits in a number of hosts.
    u32::try_from(round).unwrap_or(u32::MAX)
}
