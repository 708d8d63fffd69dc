//! The hosts meet by recursive doubling: after its rounds every host knows whether all called the same. Data may ride along,
//! whole in every round, or in halves of halves, which the same rounds backwards bring together again.
//!
//! A host that differs from another one says so in all its later messages, so that after the last round all know.

use std::ops::Range;

use super::tree::Role;
use super::{Message, Part, Work};
use crate::error::Result;
use crate::plan::{HEADER, slice};
use crate::trace::Activity;

/// What rides along.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Freight {
    Nothing,
    Whole,
    Halves,
}

/// The stages of a meeting: the part of a host that gives way, the rounds, the rounds backwards, and the result for the host
/// that gave way.
const GIVEN: u32 = 0;
const ROUND: u32 = 1;
const BACK: u32 = 100;
const RESULT: u32 = 200;

/// A host's part on its way through the rounds.
#[derive(Debug)]
pub(super) struct Load {
    freight: Freight,
    /// Whether, as far as is known, all called the same.
    agreed: bool,
    /// What of the slice it still is.
    range: Range<usize>,
    /// Where it is: in halves, in the own memory; whole, in the message that is sent next.
    at: usize,
    /// Whether there is anything.
    holds: bool,
}

impl Load {
    fn rides(&self) -> bool {
        self.agreed && self.freight != Freight::Nothing
    }
}

impl Work<'_> {
    /// Sends the first message, where this host has one to send before one comes.
    pub fn start_meeting(&mut self, freight: Freight, agreed: bool) -> Result<Load> {
        // A host that gives way sends all it has.
        let halves = freight == Freight::Halves && !matches!(self.tree.role, Role::GivesWay(_));
        let at = if halves { 0 } else { HEADER };
        let mut load = Load { freight, agreed, range: self.slice.bytes.clone(), at, holds: false };
        if load.rides() {
            load.holds = match halves {
                true => self.contribute_to_own(load.range.clone()),
                false => self.contribute_to_out(HEADER, load.range.clone()),
            };
        }
        let room = self.all_room();
        match self.tree.role {
            Role::GivesWay(to) => {
                let message = self.message(GIVEN, &load, load.range.clone());
                self.start(&[Message { host: to, bytes: message }], &[Message { host: to, bytes: room }])?;
            }
            Role::Takes(from) => self.start(&[], &[Message { host: from, bytes: room }])?,
            Role::Plain => self.start_round(0, &mut load)?,
        }
        Ok(load)
    }

    /// Goes through the rounds; false when the hosts differ, else, with freight, the slice is complete.
    pub fn finish_meeting(&mut self, mut load: Load) -> Result<bool> {
        if let Role::GivesWay(_) = self.tree.role {
            return self.finish_giving(&load);
        }
        if let Role::Takes(_) = self.tree.role {
            self.finish()?;
            self.take_in(GIVEN, true, false, &mut load)?;
            self.start_round(0, &mut load)?;
        }
        let rounds = self.tree.rounds();
        // What this host had before each round.
        let mut ranges = vec![self.slice.bytes.clone()];
        for round in 0..rounds {
            self.finish()?;
            let (_, first) = self.tree.partner(round);
            let last = round + 1 == rounds;
            self.take_in(ROUND + stage(round), first, last, &mut load)?;
            if !last {
                ranges.push(load.range.clone());
                self.start_round(round + 1, &mut load)?;
            }
        }
        if load.rides() && load.freight == Freight::Halves {
            self.gather(&ranges)?;
        }
        if let Role::Takes(from) = self.tree.role {
            let message = match load.rides() {
                true => self.finished(0, self.slice.bytes.clone(), RESULT),
                false => self.message(RESULT, &load, 0..0),
            };
            self.start(&[Message { host: from, bytes: message }], &[])?;
            self.finish()?;
        }
        Ok(load.agreed)
    }

    /// The result, for a host that gave way.
    fn finish_giving(&mut self, load: &Load) -> Result<bool> {
        self.finish()?;
        let agreed = self.read(0, RESULT)?.is_some();
        if agreed && load.rides() {
            self.take_finished(0, self.slice.bytes.clone(), RESULT)?;
        }
        Ok(agreed)
    }

    /// Sends this host's part to its partner of `round`: all of it, or one half, and is then left with the other.
    fn start_round(&mut self, round: usize, load: &mut Load) -> Result<()> {
        let (host, first) = self.tree.partner(round);
        let mut sent = load.range.clone();
        if load.freight == Freight::Halves {
            (load.range, sent) = halves(&load.range, first);
            // The lower half's part lies before that of the upper one.
            let upper = load.at + self.carried(if first { load.range.clone() } else { sent.clone() });
            let from = if first { upper } else { std::mem::replace(&mut load.at, upper) };
            if load.rides() && load.holds {
                let len = self.carried(sent.clone());
                let Work { link, own, turn, .. } = self;
                link.mail(*turn).out[HEADER..HEADER + len].copy_from_slice(&own.as_slice()[from..from + len]);
            }
        }
        let message = self.message(ROUND + stage(round), load, sent);
        let room = self.all_room();
        self.start(&[Message { host, bytes: message }], &[Message { host, bytes: room }])
    }

    /// Writes the header of a message whose content, `sent` of the slice, is in its place already, or not there.
    fn message(&mut self, stage: u32, load: &Load, sent: Range<usize>) -> Range<usize> {
        let holds = load.rides() && load.holds;
        self.header(stage, load.agreed, holds).write(self.link.mail(self.turn).out);
        0..HEADER + if holds { self.carried(sent) } else { 0 }
    }

    /// Adds what has come to this host's part, `first` telling whether that comes before the other; the `last` time the sum
    /// is finished.
    fn take_in(&mut self, stage: u32, first: bool, last: bool, load: &mut Load) -> Result<()> {
        let Some(theirs) = self.read(0, stage)? else {
            load.agreed = false;
            return Ok(());
        };
        if !load.rides() {
            return Ok(());
        }
        let place = match load.freight {
            Freight::Halves => self.own.as_mut_slice()[load.at..].as_mut_ptr(),
            _ => self.link.mail(self.turn).out[load.at..].as_mut_ptr(),
        };
        let mine: Part = load.holds.then_some(place.cast_const());
        let (low, high) = if first { (mine, theirs) } else { (theirs, mine) };
        let (collective, job, lane) = (self.slice.collective, self.slice.job, &self.slice.lane);
        // SAFETY: both parts were contributed to that range, which is this lane's; memory of different owners does not
        // overlap.
        unsafe {
            if last {
                collective.complete(job, lane, load.range.clone(), low, high);
            } else {
                collective.merge(job, lane, load.range.clone(), low, high, place);
                load.holds |= theirs.is_some();
            }
        }
        self.lap.end(Activity::Reduce);
        Ok(())
    }

    /// The rounds backwards: before round r this host had `ranges[r]`, of which its partner has the other half.
    fn gather(&mut self, ranges: &[Range<usize>]) -> Result<()> {
        for round in (0..self.tree.rounds()).rev() {
            let (host, first) = self.tree.partner(round);
            let (mine, theirs) = halves(&ranges[round], first);
            let message = self.finished(0, mine, BACK + stage(round));
            let room = 0..HEADER + theirs.len();
            self.start(&[Message { host, bytes: message }], &[Message { host, bytes: room }])?;
            self.finish()?;
            self.take_finished(0, theirs, BACK + stage(round))?;
        }
        Ok(())
    }
}

/// This host's half of `range`, the lower one if it comes `first`, and the other.
fn halves(range: &Range<usize>, first: bool) -> (Range<usize>, Range<usize>) {
    let (low, high) = (slice(range.clone(), 0, 2), slice(range.clone(), 1, 2));
    if first { (low, high) } else { (high, low) }
}

fn stage(round: usize) -> u32 {
    // There are no more rounds than bits in a number of hosts.
    u32::try_from(round).unwrap_or(u32::MAX)
}
