//! The chunks of a call on one host, in a pipeline: while a chunk is packed, the one before is reduced and the one before
//! that is unpacked. So the flags that a rank waits for were raised a step earlier, and it seldom waits.
//!
//! All ranks pack a chunk. Of a reduction, each shard owner then reduces its slice, and every rank takes the results. The
//! owner writes its result over a contribution that it has just read ([`Channel::result_rank`]), so the same cache lines
//! carry both. Of other calls, every rank takes the blocks of the others.
//! A thread that waits sleeps on the flag that it needs.
//!
//! Finer turns, of 1 to 64 KiB of each chunk, take 1.1 to 1.6 times as long on a Zen 5 processor.
//! Thread rule: as for [`Channel`].

use super::call::Call;
use super::channel::{Channel, ChunkResult, out_of_sync};
use super::chunk_source::ActiveCall;
use super::transfer;
use super::wire::shard_range;
use crate::error::Result;
use crate::timings::{Activity, PhaseTimer};
use crate::transport::rounds::{Packed, Reduced};
use crate::transport::{SlotContent, WaitContext};

/// What has become of a chunk that all ranks have packed.
enum Outcome {
    /// Its results must be taken.
    Reduced(Reduced),
    Ended(ChunkResult),
}

impl Channel {
    /// Runs `chunks` of `call` on one host. `matched`: all ranks are known to have the same call; otherwise there is one
    /// chunk, and nothing is written unless all calls match.
    pub(super) fn run_on_host(
        &mut self,
        call: &Call,
        chunks: impl Iterator<Item = usize>,
        matched: bool,
        wait_ctx: &WaitContext<'_>,
    ) -> Result<ChunkResult> {
        let mut chunks = chunks.fuse();
        let (mut packed, mut reduced) = (None, None);
        loop {
            let mut next = None;
            if let Some(chunk) = chunks.next() {
                let open = self.rounds.begin(wait_ctx)?;
                let packed = self.pack(&ActiveCall { call, plan: self.plan, wait_ctx: *wait_ctx }, chunk, open)?;
                next = Some((chunk, packed));
            }
            let mut to_unpack = None;
            if let Some((chunk, packed)) = packed {
                match self.reduce_chunk(call, chunk, packed, wait_ctx)? {
                    Outcome::Reduced(reduced) => to_unpack = Some((chunk, reduced)),
                    Outcome::Ended(ChunkResult::Matched) => {}
                    Outcome::Ended(_) if matched => return Err(out_of_sync(call, chunk)),
                    Outcome::Ended(result) => return Ok(result),
                }
            }
            if let Some((chunk, reduced)) = reduced {
                self.unpack_chunk(call, chunk, reduced, wait_ctx)?;
            }
            if next.is_none() && to_unpack.is_none() {
                return Ok(ChunkResult::Matched);
            }
            (packed, reduced) = (next, to_unpack);
        }
    }

    /// Reduces this rank's slice of a chunk that it has packed.
    fn reduce_chunk(
        &mut self,
        call: &Call,
        chunk: usize,
        packed: Packed,
        wait_ctx: &WaitContext<'_>,
    ) -> Result<Outcome> {
        let log = wait_ctx.log();
        let all_packed = packed.wait(&self.rounds, wait_ctx)?;
        if !all_packed.same_signatures(&self.rounds) {
            all_packed.end(&mut self.rounds);
            return Ok(Outcome::Ended(ChunkResult::Mismatch));
        }
        if chunk == 0 {
            self.agree_on_path(all_packed);
        }
        if !all_packed.contents(&self.rounds).are_all(SlotContent::Data) {
            return self.finish_first_zero_copy(call, all_packed, wait_ctx).map(Outcome::Ended);
        }
        self.plan.zero_copy = false;
        let mut timer = PhaseTimer::start(log, call.layout.chunk_len(chunk));
        if transfer::is_direct(call) {
            self.take(call, chunk, all_packed);
            // Nobody waits for this flag, but it must not lag so far that it looks newer.
            all_packed.post_reduced(&self.rounds);
            all_packed.end(&mut self.rounds);
            log.flag();
            timer.end(Activity::Copy);
            return Ok(Outcome::Ended(ChunkResult::Matched));
        }
        let shard = self.own_shard(call, chunk, all_packed);
        let slice = shard_range(&self.topology, call, chunk, shard.shard);
        // SAFETY: all ranks have packed, so this shard owns its slice in all slots.
        unsafe { transfer::reduce_slice(call, &shard, slice) };
        timer.end(Activity::Reduce);
        let reduced = all_packed.post_reduced(&self.rounds);
        log.flag();
        Ok(Outcome::Reduced(reduced))
    }

    /// Takes the results of a chunk, of which this rank has reduced its slice.
    fn unpack_chunk(&mut self, call: &Call, chunk: usize, reduced: Reduced, wait_ctx: &WaitContext<'_>) -> Result<()> {
        let log = wait_ctx.log();
        let all_reduced = reduced.wait(&self.rounds, self.topology.local_size(), wait_ctx)?;
        let mut timer = PhaseTimer::start(log, call.layout.chunk_len(chunk));
        self.unpack(call, chunk, all_reduced);
        all_reduced.end(&mut self.rounds);
        log.flag();
        timer.end(Activity::Copy);
        Ok(())
    }
}
