//! A lane's slice of a chunk between hosts, by one of several algorithms.
//!
//! The *first* chunk of a call decides whether all hosts called the same thing. Before that is known, hosts may hold calls of
//! any kind and size, so the pattern of messages must not depend on the call: the hosts [meet](meeting) by recursive
//! doubling, and a call's data rides along, whole or in halves, or, for the other algorithms, follows. Further chunks go
//! straight to their [`Algorithm`].
//!
//! The order of addition is that of a [tree](Tree) over the hosts, which every algorithm keeps but the ring: the same bits.
//! Every chunk has two parts, so that two chunks can be under way: `start`, which sends the first messages, and `finish`.
//! Thread rule: as for [`super::Channel`].

mod algorithm;
mod cost;
mod header;
mod meeting;
mod pairwise;
mod ring;
mod tree;

use std::ops::Range;
use std::ptr;

use super::{Between, Job, Lane, Part};
use crate::error::Result;
use crate::plan::{HEADER, slice};
use crate::topology::Topology;
use crate::trace::{Activity, Lap};
use crate::transport::memory::Aligned;
use crate::transport::{Link, Message, Network, Patience, TURNS};
pub use algorithm::{Algorithm, Choice};
use header::Header;
use meeting::{Freight, Load};
use tree::Tree;

/// One lane's way to the other hosts.
pub(crate) struct Cluster {
    pub link: Box<dyn Link>,
    tree: Tree,
    network: Network,
    choice: Choice,
    /// Of each turn: this host's part of what it completes.
    own: [Aligned; TURNS],
}

/// A slice of a chunk under way between hosts.
#[derive(Debug)]
pub(super) struct Flight {
    algorithm: Algorithm,
    /// What the hosts carry while they meet, if they do.
    load: Option<Load>,
}

/// What is to be done with a slice.
pub(super) struct Slice<'a> {
    /// How.
    pub collective: &'a dyn Between,
    /// The call.
    pub job: &'a Job,
    /// The lane, on this host.
    pub lane: Lane<'a>,
    /// Its bytes of the chunk.
    pub bytes: Range<usize>,
    /// The step.
    pub step: u32,
}

impl Cluster {
    /// For the links of a host's lane.
    pub fn new(mut link: Box<dyn Link>, topology: &Topology, network: Network, choice: Choice) -> Cluster {
        let capacity = link.mail(0).out.len();
        let own = [(); TURNS].map(|()| Aligned::new(capacity));
        Cluster { link, tree: Tree::new(topology.hosts(), topology.host()), network, choice, own }
    }

    /// Sends the first messages of a slice. `matched` where all hosts are known to have called the same; else `agreed` is
    /// whether the ranks of this host have.
    pub(super) fn start(
        &mut self,
        slice: &Slice<'_>,
        matched: bool,
        agreed: bool,
        patience: &Patience<'_>,
    ) -> Result<Flight> {
        let (choice, network) = (self.choice, self.network);
        let mut work = self.work(slice, patience);
        let algorithm = match choice {
            Choice::Always(algorithm) => algorithm,
            Choice::Auto => cost::best(&network, work.hosts(), work.load(), !matched),
        };
        let freight = match algorithm {
            Algorithm::Doubling => Some(Freight::Whole),
            Algorithm::Halving => Some(Freight::Halves),
            Algorithm::Pairwise | Algorithm::Ring => (!matched).then_some(Freight::Nothing),
        };
        let load = freight.map(|freight| work.start_meeting(freight, agreed)).transpose()?;
        if load.is_none() {
            work.start_pieces(algorithm)?;
        }
        Ok(Flight { algorithm, load })
    }

    /// Completes a slice in this lane's slot; false, with nothing written and the same on all hosts, where ranks of a host
    /// or hosts differ.
    pub(super) fn finish(&mut self, slice: &Slice<'_>, flight: Flight, patience: &Patience<'_>) -> Result<bool> {
        let mut work = self.work(slice, patience);
        let Flight { algorithm, load } = flight;
        let in_pieces = matches!(algorithm, Algorithm::Pairwise | Algorithm::Ring);
        if let Some(load) = load {
            let agreed = work.finish_meeting(load)?;
            if !agreed || !in_pieces {
                return Ok(agreed);
            }
            work.start_pieces(algorithm)?;
        }
        match algorithm {
            Algorithm::Ring => work.finish_ring()?,
            _ => work.finish_pairwise()?,
        }
        Ok(true)
    }

    fn work<'a>(&'a mut self, slice: &'a Slice<'a>, patience: &'a Patience<'a>) -> Work<'a> {
        let turn = slice.step as usize % TURNS;
        // Beside a message the clock is nothing.
        let lap = Lap::start(patience.log(), usize::MAX);
        Work { slice, turn, link: self.link.as_mut(), own: &mut self.own[turn], tree: &self.tree, patience, lap }
    }
}

/// A slice, and what its messages need; the algorithms are its methods.
struct Work<'a> {
    slice: &'a Slice<'a>,
    turn: usize,
    link: &'a mut dyn Link,
    own: &'a mut Aligned,
    tree: &'a Tree,
    patience: &'a Patience<'a>,
    lap: Lap<'a>,
}

impl Work<'_> {
    /// Sends the first messages of an algorithm in pieces.
    fn start_pieces(&mut self, algorithm: Algorithm) -> Result<()> {
        match algorithm {
            Algorithm::Ring => self.start_ring(),
            _ => self.start_pairwise(),
        }
    }

    fn hosts(&self) -> usize {
        self.slice.lane.topology.hosts()
    }

    fn host(&self) -> usize {
        self.slice.lane.topology.host()
    }

    fn others(&self) -> impl Iterator<Item = usize> + use<> {
        let me = self.host();
        (0..self.hosts()).filter(move |&host| host != me)
    }

    /// The part of the slice that `host` completes where there are as many parts as hosts.
    fn piece(&self, host: usize) -> Range<usize> {
        slice(self.slice.bytes.clone(), host, self.hosts())
    }

    fn header(&self, stage: u32, agreed: bool, holds: bool) -> Header {
        Header { signature: self.slice.job.signature, step: self.slice.step, stage, agreed, holds }
    }

    /// What the message at `at` in the inbox says, and where its content is; `None` when its sender does not agree.
    fn read(&mut self, at: usize, stage: u32) -> Result<Option<Part>> {
        let message = &self.link.mail(self.turn).inbox[at..];
        let header = Header::read(message, self.slice.step, stage, self.slice.job)?;
        let agrees = header.agreed && header.signature == self.slice.job.signature;
        Ok(agrees.then(|| header.holds.then(|| message[HEADER..].as_ptr())))
    }

    /// The same where all hosts are known to agree.
    fn read_matched(&mut self, at: usize, stage: u32) -> Result<Part> {
        let read = self.read(at, stage)?;
        read.ok_or_else(|| header::lost(self.slice.job))
    }

    /// What the lanes of this host bring, as if all were like this one.
    fn load(&self) -> cost::Load {
        let lanes = self.slice.lane.topology.lanes();
        let bytes = self.slice.bytes.clone();
        cost::Load { finished: bytes.len() * lanes, carried: self.carried(bytes) * lanes, lanes }
    }

    /// The bytes that the hosts' parts of `piece` take.
    fn carried(&self, piece: Range<usize>) -> usize {
        self.slice.collective.carried(self.slice.job, self.slice.lane.chunk, piece)
    }

    /// Writes this host's part of `piece` to what is sent, from byte `at`; false when it has none.
    fn contribute_to_out(&mut self, at: usize, piece: Range<usize>) -> bool {
        let Slice { collective, job, lane, .. } = self.slice;
        // SAFETY: all ranks of the host have packed, so the slice is this lane's.
        unsafe { collective.contribute(job, lane, piece, &mut self.link.mail(self.turn).out[at..]) }
    }

    /// The same to the start of the own memory.
    fn contribute_to_own(&mut self, piece: Range<usize>) -> bool {
        let Slice { collective, job, lane, .. } = self.slice;
        // SAFETY: as above.
        unsafe { collective.contribute(job, lane, piece, self.own.as_mut_slice()) }
    }

    /// Writes a message with this host's part of `piece` to what is sent, from byte `at`.
    fn contribution(&mut self, at: usize, piece: Range<usize>, stage: u32) -> Range<usize> {
        let holds = self.contribute_to_out(at + HEADER, piece.clone());
        self.header(stage, true, holds).write(&mut self.link.mail(self.turn).out[at..]);
        at..at + HEADER + if holds { self.carried(piece) } else { 0 }
    }

    /// Writes a message with the finished `piece` to what is sent, from byte `at`.
    fn finished(&mut self, at: usize, piece: Range<usize>, stage: u32) -> Range<usize> {
        self.header(stage, true, true).write(&mut self.link.mail(self.turn).out[at..]);
        let end = at + HEADER + piece.len();
        let body = &mut self.link.mail(self.turn).out[at + HEADER..end];
        // SAFETY: the slice of the own slot is this lane's, and completed there.
        unsafe { ptr::copy_nonoverlapping(self.slice.lane.own().add(piece.start), body.as_mut_ptr(), piece.len()) };
        at..end
    }

    /// Takes a finished `piece` from the message at `at` of what has come.
    fn take_finished(&mut self, at: usize, piece: Range<usize>, stage: u32) -> Result<()> {
        self.read_matched(at, stage)?;
        let body = &self.link.mail(self.turn).inbox[at + HEADER..at + HEADER + piece.len()];
        // SAFETY: as in `finished`.
        unsafe { ptr::copy_nonoverlapping(body.as_ptr(), self.slice.lane.own().add(piece.start), piece.len()) };
        Ok(())
    }

    /// Room for one message, as long as it may be.
    fn all_room(&mut self) -> Range<usize> {
        0..self.link.mail(self.turn).inbox.len()
    }

    fn start(&mut self, sends: &[Message], receives: &[Message]) -> Result<()> {
        self.lap.end(Activity::Reduce);
        self.patience.log().messages(sends.len(), sends.iter().map(|message| message.bytes.len()).sum());
        self.link.start(self.turn, sends, receives)
    }

    fn finish(&mut self) -> Result<()> {
        self.lap.skip();
        self.link.finish(self.turn, self.patience)?;
        self.lap.end(Activity::Network);
        Ok(())
    }
}
