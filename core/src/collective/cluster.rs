//! A lane's slice of a chunk between hosts: scatter of its pieces, one a host, and gather of the finished ones.
//!
//! Thread rule: as for [`super::Channel`].

use std::ops::Range;
use std::ptr;

use super::{Collective, Job, Lane};
use crate::error::{Error, Result};
use crate::plan::{HEADER, slice};
use crate::trace::{Activity, Lap};
use crate::transport::{Link, Out, Patience};

/// One chunk of one lane between hosts.
pub(super) struct Cluster<'a> {
    /// What is done with it.
    pub collective: &'static dyn Collective,
    /// The call.
    pub job: &'a Job,
    /// The lane, on this host.
    pub lane: Lane<'a>,
    /// Its slice of the chunk.
    pub slice: Range<usize>,
    /// The step.
    pub step: u32,
    /// Whether the ranks of this host agree.
    pub agreed: bool,
}

impl Cluster<'_> {
    fn piece(&self, host: usize) -> Range<usize> {
        slice(self.slice.clone(), host, self.lane.topology.hosts())
    }

    fn others(&self) -> impl Iterator<Item = usize> + use<> {
        let me = self.lane.topology.host();
        (0..self.lane.topology.hosts()).filter(move |&host| host != me)
    }

    fn header(&self, stage: u32) -> Header {
        Header { signature: self.job.signature, step: self.step, stage, agreed: self.agreed }
    }

    /// Scatter, complete the own piece, gather. False, on every host, when one host's ranks or two hosts differ.
    pub fn carry(&self, link: &mut dyn Link, own_part: &mut [u8], patience: &Patience<'_>) -> Result<bool> {
        let me = self.lane.topology.host();
        // Beside a message the clock is nothing.
        let mut lap = Lap::start(patience.log(), usize::MAX);
        let mut lens = vec![HEADER; self.lane.topology.hosts()];
        for host in self.others() {
            let message = link.message_to(host);
            self.header(0).write(message);
            if self.agreed {
                let body = &mut message[HEADER..];
                // SAFETY: all ranks of the host have packed, so the slice is this lane's.
                lens[host] += unsafe { self.collective.scatter(self.job, &self.lane, self.piece(host), body) };
            }
        }
        lap.end(Activity::Reduce);
        patience.log().messages(lens.len() - 1, lens.iter().sum::<usize>() - lens[me]);
        link.exchange(Out::Each(&lens), patience)?;
        lap.end(Activity::Network);
        for host in self.others() {
            if !self.header(0).matches(link.message_from(host), self.job)? {
                return Ok(false);
            }
        }
        if !self.agreed {
            return Ok(false);
        }
        // SAFETY: as above; the parts are what the same collective scattered for this piece.
        unsafe {
            self.collective.scatter(self.job, &self.lane, self.piece(me), own_part);
            let part = |host| {
                if host == me { own_part.as_ptr() } else { link.message_from(host)[HEADER..].as_ptr() }
            };
            let parts: Vec<*const u8> = (0..self.lane.topology.hosts()).map(part).collect();
            self.collective.complete(self.job, &self.lane, self.piece(me), &parts);
        }
        self.gather(link, &mut lap, patience)?;
        Ok(true)
    }

    /// Sends the own piece to all and takes theirs.
    fn gather(&self, link: &mut dyn Link, lap: &mut Lap<'_>, patience: &Patience<'_>) -> Result<()> {
        let mine = self.piece(self.lane.topology.host());
        let message = link.message_to_all();
        self.header(1).write(message);
        let body = &mut message[HEADER..HEADER + mine.len()];
        // SAFETY: the slice of the own slot is this lane's.
        unsafe { ptr::copy_nonoverlapping(self.lane.own().add(mine.start), body.as_mut_ptr(), mine.len()) };
        lap.end(Activity::Reduce);
        let hosts = self.others().count();
        patience.log().messages(hosts, hosts * (HEADER + mine.len()));
        link.exchange(Out::Same(HEADER + mine.len()), patience)?;
        lap.end(Activity::Network);
        for host in self.others() {
            let message = link.message_from(host);
            self.header(1).matches(message, self.job)?;
            let piece = self.piece(host);
            let body = &message[HEADER..HEADER + piece.len()];
            // SAFETY: as above.
            unsafe { ptr::copy_nonoverlapping(body.as_ptr(), self.lane.own().add(piece.start), piece.len()) };
        }
        lap.end(Activity::Copy);
        Ok(())
    }
}

/// What every message between hosts starts with.
struct Header {
    signature: u64,
    step: u32,
    stage: u32,
    agreed: bool,
}

impl Header {
    fn write(&self, message: &mut [u8]) {
        message[0..8].copy_from_slice(&self.signature.to_le_bytes());
        message[8..12].copy_from_slice(&self.step.to_le_bytes());
        message[12..16].copy_from_slice(&self.stage.to_le_bytes());
        message[16] = u8::from(self.agreed);
    }

    /// Whether `message` comes from a host whose ranks agree among themselves and with these.
    fn matches(&self, message: &[u8], job: &Job) -> Result<bool> {
        if message[8..12] != self.step.to_le_bytes() || message[12..16] != self.stage.to_le_bytes() {
            return Err(Error::Internal(format!("a message of another step arrived in {}", job.title())));
        }
        Ok(message[0..8] == self.signature.to_le_bytes() && message[16] == 1)
    }
}
