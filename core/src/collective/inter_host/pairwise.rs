//! Pairwise exchange: each host receives its piece of the slice from every other host, completes it, and sends it to
//! all.

use super::exchange::SliceExchange;
use crate::collective::phases::Partial;
use crate::error::Result;
use crate::timings::Activity;
use crate::transport::Message;
use crate::wire_layout::{ALIGN, HEADER, max_acc_bytes};

const REDUCE_SCATTER: u32 = 1;
const ALLGATHER: u32 = 2;

impl SliceExchange<'_> {
    /// Receive ranges for one message of `len` bytes from each of the other hosts.
    fn recv_ranges(&self, len: usize) -> Vec<Message> {
        let recv = (HEADER + len).next_multiple_of(ALIGN);
        let out = |(out, host)| Message { host, bytes: out * recv..(out + 1) * recv };
        self.other_hosts().enumerate().map(out).collect()
    }

    pub fn start_pairwise(&mut self) -> Result<()> {
        let mut at = 0;
        let mut sends = Vec::with_capacity(self.hosts());
        for host in self.other_hosts() {
            let bytes = self.pack_partial(at, self.piece(host), REDUCE_SCATTER);
            at = bytes.end.next_multiple_of(ALIGN);
            sends.push(Message { host, bytes });
        }
        let receives = self.recv_ranges(max_acc_bytes(self.piece(self.host()).len()));
        self.start(&sends, &receives)
    }

    pub fn finish_pairwise(&mut self) -> Result<()> {
        let me = self.host();
        let own_piece = self.piece(me);
        // Overlaps with the messages in flight.
        let own: Partial =
            self.contribute_to_local_buffer(own_piece.clone()).then(|| self.host_partial.as_ptr().cast_const());
        self.timer.end(Activity::Reduce);
        self.finish()?;
        let mut parts = vec![None; self.hosts()];
        parts[me] = own;
        for recv in self.recv_ranges(max_acc_bytes(own_piece.len())) {
            parts[recv.host] = self.read_matched(recv.bytes.start, REDUCE_SCATTER)?;
        }
        let add_order = self.tree.add_order();
        let (collective, call, shard) = (self.slice.collective, self.slice.call, &self.slice.shard);
        for (number, &(low, high)) in add_order.iter().enumerate() {
            let (first, second) = (parts[low], parts[high]);
            // SAFETY: all parts are partial sums of this piece; this host owns the receive buffer and the local buffer.
            unsafe {
                if number + 1 == add_order.len() {
                    collective.finish_shard(call, shard, own_piece.clone(), first, second);
                } else if let Some(out) = first.or(second) {
                    collective.add_partials(call, shard, own_piece.clone(), first, second, out.cast_mut());
                    parts[low] = Some(out);
                }
            }
        }

        let message = self.pack_result(0, own_piece, ALLGATHER);
        let sends: Vec<Message> = self.other_hosts().map(|host| Message { host, bytes: message.clone() }).collect();
        // Pieces differ by at most one cache line.
        let max_piece = self.other_hosts().map(|host| self.piece(host).len()).max().unwrap_or(0);
        let receives = self.recv_ranges(max_piece);
        self.start(&sends, &receives)?;
        self.finish()?;
        for recv in receives {
            self.unpack_result(recv.bytes.start, self.piece(recv.host), ALLGATHER)?;
        }
        Ok(())
    }
}
