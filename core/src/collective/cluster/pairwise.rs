//! Pairwise exchange: every host gets its piece of the slice from every other one, completes it, and sends it to all.

use super::{Message, Part, Work};
use crate::error::Result;
use crate::plan::{ALIGN, HEADER, widest};
use crate::trace::Activity;

const PARTS: u32 = 1;
const RESULTS: u32 = 2;

impl Work<'_> {
    /// Room for a message of so many bytes from each of the other hosts; where there is that for one host.
    fn rooms(&self, len: usize) -> Vec<Message> {
        let room = (HEADER + len).next_multiple_of(ALIGN);
        let place = |(place, host)| Message { host, bytes: place * room..(place + 1) * room };
        self.others().enumerate().map(place).collect()
    }

    pub fn start_pairwise(&mut self) -> Result<()> {
        let mut at = 0;
        let mut sends = Vec::with_capacity(self.hosts());
        for host in self.others() {
            let bytes = self.contribution(at, self.piece(host), PARTS);
            at = bytes.end.next_multiple_of(ALIGN);
            sends.push(Message { host, bytes });
        }
        let receives = self.rooms(widest(self.piece(self.host()).len()));
        self.start(&sends, &receives)
    }

    pub fn finish_pairwise(&mut self) -> Result<()> {
        let me = self.host();
        let mine = self.piece(me);
        // While the messages travel.
        let own: Part = self.contribute_to_own(mine.clone()).then(|| self.own.as_ptr().cast_const());
        self.lap.end(Activity::Reduce);
        self.finish()?;
        let mut parts = vec![None; self.hosts()];
        parts[me] = own;
        for room in self.rooms(widest(mine.len())) {
            parts[room.host] = self.read_matched(room.bytes.start, PARTS)?;
        }
        let additions = self.tree.additions();
        let (collective, job, lane) = (self.slice.collective, self.slice.job, &self.slice.lane);
        for (number, &(low, high)) in additions.iter().enumerate() {
            let (first, second) = (parts[low], parts[high]);
            // SAFETY: the parts were contributed to this piece; those that came, and the own memory, are nobody else's.
            unsafe {
                if number + 1 == additions.len() {
                    collective.complete(job, lane, mine.clone(), first, second);
                } else if let Some(place) = first.or(second) {
                    collective.merge(job, lane, mine.clone(), first, second, place.cast_mut());
                    parts[low] = Some(place);
                }
            }
        }

        let message = self.finished(0, mine, RESULTS);
        let sends: Vec<Message> = self.others().map(|host| Message { host, bytes: message.clone() }).collect();
        // One piece may be a line longer than another.
        let longest = self.others().map(|host| self.piece(host).len()).max().unwrap_or(0);
        let receives = self.rooms(longest);
        self.start(&sends, &receives)?;
        self.finish()?;
        for room in receives {
            self.take_finished(room.bytes.start, self.piece(room.host), RESULTS)?;
        }
        Ok(())
    }
}
