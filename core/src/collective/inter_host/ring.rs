//! Ring: in n - 1 rounds each piece of the slice visits all hosts, and each host adds its partial sums. In n - 1 more
//! rounds the completed pieces visit all hosts.

use std::ops::Range;

use super::exchange::SliceExchange;
use crate::collective::partials::Partial;
use crate::error::Result;
use crate::timings::Activity;
use crate::transport::Message;
use crate::wire_layout::{HEADER, max_acc_bytes};

/// Message kinds of the first n - 1 rounds start at 1, those of the other rounds here.
const ALLGATHER: u32 = 1 << 16;

impl SliceExchange<'_> {
    /// The piece that this host sends in round `round`; it receives the one of round `round + 1`.
    fn ring_piece(&self, round: usize) -> usize {
        (self.host() + 2 * self.hosts() - round) % self.hosts()
    }

    fn next(&self) -> usize {
        (self.host() + 1) % self.hosts()
    }

    fn previous(&self) -> usize {
        (self.host() + self.hosts() - 1) % self.hosts()
    }

    pub fn start_ring(&mut self) -> Result<()> {
        let message = self.pack_partial(0, self.piece(self.ring_piece(0)), round_kind(0));
        self.send_next(message, self.ring_piece(1))
    }

    /// Sends a message to the next host and receives `piece` from the previous host.
    fn send_next(&mut self, bytes: Range<usize>, piece: usize) -> Result<()> {
        let recv_range = 0..HEADER + max_acc_bytes(self.piece(piece).len());
        let (next, previous) = (self.next(), self.previous());
        self.start(&[Message { host: next, bytes }], &[Message { host: previous, bytes: recv_range }])
    }

    pub fn finish_ring(&mut self) -> Result<()> {
        let last = self.hosts() - 1;
        for round in 1..=last {
            let piece = self.piece(self.ring_piece(round));
            // Overlaps with the message in flight.
            let own: Partial =
                self.contribute_to_local_buffer(piece.clone()).then(|| self.host_partial.as_ptr().cast_const());
            self.timer.end(Activity::Reduce);
            self.finish()?;
            let received = self.read_matched(0, round_kind(round - 1))?;
            let slice = self.slice;
            let out = self.link.buffers(self.exchange_index).send[HEADER..].as_mut_ptr();
            // SAFETY: both operands are partial sums of this piece; the three buffers do not overlap.
            unsafe {
                if round == last {
                    slice.ops.finish_shard(&slice.part(piece), received, own);
                } else {
                    slice.ops.add_partials(&slice.part(piece.clone()), received, own, out);
                    let has_data = received.is_some() || own.is_some();
                    self.header(round_kind(round), true, has_data).write(self.link.buffers(self.exchange_index).send);
                    let len = if has_data { self.partial_bytes(piece) } else { 0 };
                    self.send_next(0..HEADER + len, self.ring_piece(round + 1))?;
                }
            }
        }
        for round in 0..last {
            // Starts with the piece that this host completed.
            let (sent, received) = (self.ring_piece(last + round), self.ring_piece(last + round + 1));
            let message = self.pack_result(0, self.piece(sent), ALLGATHER + round_kind(round));
            self.send_next(message, received)?;
            self.finish()?;
            self.unpack_result(0, self.piece(received), ALLGATHER + round_kind(round))?;
        }
        Ok(())
    }
}

fn round_kind(round: usize) -> u32 {
    // The number of hosts is far below 2^32.
    u32::try_from(round + 1).unwrap_or(u32::MAX)
}
