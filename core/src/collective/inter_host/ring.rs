//! Ring: in n - 1 rounds each piece of the slice visits all hosts, and each host adds its partial sums. In n - 1 more
//! rounds the completed pieces visit all hosts.

use std::ops::Range;

use super::exchange::SliceExchange;
use super::stage::{ExchangeStage, Next};
use crate::collective::partials::Partial;
use crate::error::Result;
use crate::transport::HostMessage;
use crate::wire_layout::{HEADER, max_acc_bytes};

/// HostMessage kinds of the first n - 1 rounds start at 1, those of the other rounds here.
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

    /// Sends this host's part of the first piece. The messages of round r are those of stage `Ring(r)`.
    pub fn start_ring(&mut self, has_own: &mut bool) -> Result<ExchangeStage> {
        let message = self.pack_partial(0, self.piece(self.ring_piece(0)), round_kind(0))?;
        self.send_next(message, self.ring_piece(1))?;
        // Overlaps with the message in flight.
        *has_own = self.contribute_to_local_buffer(self.piece(self.ring_piece(1)))?;
        Ok(ExchangeStage::Ring(0))
    }

    /// Sends a message to the next host and receives `piece` from the previous host.
    fn send_next(&mut self, bytes: Range<usize>, piece: usize) -> Result<()> {
        let recv_range = 0..HEADER + max_acc_bytes(self.piece(piece).len());
        let (next, previous) = (self.next(), self.previous());
        self.start(&[HostMessage { host: next, bytes }], &[HostMessage { host: previous, bytes: recv_range }])
    }

    /// In the first rounds, adds this host's part to the received piece and sends it on, until the piece is complete.
    /// Then passes completed pieces on.
    pub fn finish_ring(&mut self, round: usize, has_own: &mut bool) -> Result<Next> {
        let last = self.hosts() - 1;
        if round >= last {
            let piece = self.piece(self.ring_piece(round + 1));
            self.unpack_result(0, piece, ALLGATHER + round_kind(round - last))?;
            return if round + 1 < 2 * last { self.pass_on(round + 1) } else { Ok(Next::Done(true)) };
        }
        let piece = self.piece(self.ring_piece(round + 1));
        let own: Partial = has_own.then(|| self.host_partial().as_ptr());
        let received = self.read_matched(0, round_kind(round))?;
        let slice = self.slice;
        if round + 1 == last {
            // SAFETY: both operands are partial sums of this piece; the buffers do not overlap.
            unsafe { slice.ops.finish_shard(&slice.part(piece), received, own) }?;
            return self.pass_on(last);
        }
        let out = self.link.buffers(self.exchange_index).send[HEADER..].as_mut_ptr();
        // SAFETY: as above.
        unsafe { slice.ops.add_partials(&slice.part(piece.clone()), received, own, out) };
        let has_data = received.is_some() || own.is_some();
        self.header(round_kind(round + 1), true, has_data).write(self.link.buffers(self.exchange_index).send);
        let len = if has_data { self.partial_bytes(piece) } else { 0 };
        self.send_next(0..HEADER + len, self.ring_piece(round + 2))?;
        *has_own = self.contribute_to_local_buffer(self.piece(self.ring_piece(round + 2)))?;
        Ok(Next::ExchangeStage(ExchangeStage::Ring(round + 1)))
    }

    /// Sends the completed piece of `round` to the next host.
    fn pass_on(&mut self, round: usize) -> Result<Next> {
        let kind = ALLGATHER + round_kind(round - (self.hosts() - 1));
        let message = self.pack_result(0, self.piece(self.ring_piece(round)), kind)?;
        self.send_next(message, self.ring_piece(round + 1))?;
        Ok(Next::ExchangeStage(ExchangeStage::Ring(round)))
    }
}

fn round_kind(round: usize) -> u32 {
    // The number of hosts is far below 2^32.
    u32::try_from(round + 1).unwrap_or(u32::MAX)
}
