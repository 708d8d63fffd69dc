//! Updates and reads of shards on other hosts, by messages: a thread of the owner applies them, without help of its
//! program.
//!
//! A request is one message: a header, and the elements of an update. The owner answers when the update is applied, or with
//! the elements. Requests are of at most [`CHUNK_BYTES`], several under way at a time; messages from one rank arrive in
//! order, and the owner applies them in order.

use std::collections::VecDeque;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use serde::{Deserialize, Serialize};

use super::operation::{Action, Operation};
use super::state::ServerState;
use crate::codec::{decode, encode};
use crate::error::{Error, Result};
use crate::group::{Group, MessageOptions, Timeout};
use crate::p2p::{Spans, Status, Transfer};

/// Bytes of the elements of a request: the network has begun to send the next one long before this one has ended.
const CHUNK_BYTES: usize = 1 << 20;
/// The requests of an operation that are under way at a time.
const WINDOW: usize = 8;
/// Room for the header of a request.
const HEADER_BYTES: usize = 64;
/// The tag of requests; those of answers follow.
const REQUEST_TAG: u32 = 0;
const MAX_ANSWER_TAG: u32 = 1 << 20;

/// A request for some elements of the shard of its receiver.
#[derive(Debug, Clone, Copy, Serialize, Deserialize)]
struct RequestHeader {
    action: Action,
    tensor: usize,
    start: usize,
    len: usize,
    answer: u32,
}

/// The header as bytes. `None`: the thread that applies requests ends; only its own rank sends that.
fn header_bytes(header: Option<RequestHeader>) -> Result<[u8; HEADER_BYTES]> {
    let (mut bytes, encoded) = ([0; HEADER_BYTES], encode(&header)?);
    let room = bytes.get_mut(..encoded.len());
    room.ok_or_else(|| Error::Internal("the header of a request is too long".into()))?.copy_from_slice(&encoded);
    Ok(bytes)
}

/// Starts a message in the group of a server.
///
/// # Safety
/// The memory of `spans` is valid until it has ended.
unsafe fn message(group: &Group, sends: bool, spans: Spans, options: MessageOptions<'_>) -> Result<Transfer> {
    let messenger = group.ready_messenger()?;
    let (endpoint, message) = (messenger.endpoint(), group.message(messenger, &options));
    // SAFETY: guaranteed by the caller.
    unsafe {
        match sends {
            true => Transfer::send(endpoint, &message, spans, None),
            false => Transfer::receive(endpoint, &message, spans, None),
        }
    }
}

/// A request under way. Its memory lives until both messages have ended.
struct Request {
    sent: Transfer,
    answer: Transfer,
    _header: Box<[u8; HEADER_BYTES]>,
    _applied: Box<[u8; 1]>,
}

/// The requests of an operation to the ranks of other hosts.
pub(super) struct Exchange<'a> {
    server: &'a ServerState,
    operation: &'a Operation,
    /// Those that were not sent yet: owner, tensor, elements of the shard.
    open: VecDeque<(usize, usize, Range<usize>)>,
    requests: VecDeque<Request>,
    answer_tag: u32,
}

impl<'a> Exchange<'a> {
    /// Sends the first requests.
    ///
    /// # Errors
    /// Those of the messages.
    ///
    /// # Safety
    /// The memory of the operation is valid until the exchange is dropped.
    pub unsafe fn start(server: &'a ServerState, operation: &'a Operation) -> Result<Exchange<'a>> {
        let shards = &server.shards;
        let far: Vec<usize> = (0..shards.layout().ranks()).filter(|&rank| !shards.is_local(rank)).collect();
        let mut open = VecDeque::new();
        for tensor in operation.tensors.clone().filter(|_| !far.is_empty()) {
            let stored = shards.layout().tensors()[tensor];
            let len = CHUNK_BYTES / stored.storage().size();
            // Owner by owner in turns, so that all hosts work.
            for start in (0..shards.shard(tensor, 0).len()).step_by(len) {
                for &owner in &far {
                    let end = shards.shard(tensor, owner).len().min(start + len);
                    if start < end {
                        open.push_back((owner, tensor, start..end));
                    }
                }
            }
        }
        let answer_tag = match open.is_empty() {
            true => REQUEST_TAG,
            false => REQUEST_TAG + 1 + server.operations.fetch_add(1, Ordering::Relaxed) % MAX_ANSWER_TAG,
        };
        let mut exchange = Exchange { server, operation, open, requests: VecDeque::new(), answer_tag };
        exchange.advance(false)?;
        Ok(exchange)
    }

    /// Takes answers and sends further requests; with `to_end`, waits for all.
    ///
    /// # Errors
    /// Those of the messages.
    pub fn advance(&mut self, to_end: bool) -> Result<()> {
        loop {
            while self.requests.len() < WINDOW
                && let Some((owner, tensor, part)) = self.open.pop_front()
            {
                self.request(owner, tensor, part)?;
            }
            let Some(first) = self.requests.front() else { return Ok(()) };
            if !to_end && (first.sent.test().is_none() || first.answer.test().is_none()) {
                return Ok(());
            }
            first.sent.wait(None)?;
            first.answer.wait(None)?;
            self.requests.pop_front();
        }
    }

    fn request(&mut self, owner: usize, tensor: usize, part: Range<usize>) -> Result<()> {
        let Exchange { server, operation, answer_tag: tag, .. } = *self;
        let stored = server.shards.layout().tensors()[tensor];
        let element = server.shards.shard(tensor, owner).start + part.start;
        let (memory, bytes) = (operation.memory(tensor, element), part.len() * stored.dtype.size());
        let action = operation.action;
        let header = RequestHeader { action, tensor, start: part.start, len: part.len(), answer: tag };
        let (mut header, mut applied) = (Box::new(header_bytes(Some(header))?), Box::new([0]));
        let (mut sent, mut answered) = (Spans::default(), Spans::default());
        sent.add(header.as_mut_ptr(), HEADER_BYTES)?;
        if action.sends_elements() {
            sent.add(memory, bytes)?;
        }
        match action {
            Action::Send(_) => answered.add(applied.as_mut_ptr(), 1)?,
            Action::Receive => answered.add(memory, bytes)?,
        }
        let options = |tag| MessageOptions {
            peer: Some(owner),
            tag: Some(tag),
            name: "parameter server",
            timeout: operation.timeout,
            exact: false,
        };
        // SAFETY: the operation's memory is valid (`start`); the rest is kept in the request.
        let answer = unsafe { message(&server.group, false, answered, options(tag)) }?;
        // SAFETY: as above.
        match unsafe { message(&server.group, true, sent, options(REQUEST_TAG)) } {
            Ok(sent) => {
                self.requests.push_back(Request { sent, answer, _header: header, _applied: applied });
                Ok(())
            }
            Err(error) => {
                server.group.fail(&error);
                // The group has ended, and so does the receive.
                let _ended = answer.wait(None);
                Err(error)
            }
        }
    }
}

impl Drop for Exchange<'_> {
    /// After an error: ends what is under way, whose memory is the caller's.
    fn drop(&mut self) {
        if self.requests.is_empty() {
            return;
        }
        self.server.group.fail(&Error::PeerLost(format!("{} failed on {}", self.operation.describe(), {
            self.server.group.rank_name(self.server.rank)
        })));
        for request in self.requests.drain(..) {
            let _ended = (request.sent.wait(None), request.answer.wait(None));
        }
    }
}

/// The thread of an owner: applies the requests of ranks of other hosts until the server ends.
pub(super) fn serve(server: &Arc<ServerState>) {
    let mut answers = VecDeque::new();
    if let Err(error) = serve_requests(server, &mut answers) {
        // Without this thread, the others would wait for it.
        server.group.fail(&error);
    }
    for (answer, _memory) in answers {
        let _ended: Result<Status> = answer.wait(None);
    }
}

/// An answer under way, with its memory.
type Answer = (Transfer, Vec<u8>);

/// Memory for a request: its header, then its elements.
struct Inbox(Vec<u64>);

impl Inbox {
    fn receive(&mut self, group: &Group) -> Result<Transfer> {
        let mut spans = Spans::default();
        spans.add(self.0.as_mut_ptr().cast(), self.0.len() * 8)?;
        let options = MessageOptions {
            tag: Some(REQUEST_TAG),
            name: "requests to the parameter server",
            timeout: Timeout::Override(None),
            ..MessageOptions::default()
        };
        // SAFETY: the memory lives until the receive has ended: `serve_requests` waits for it.
        unsafe { message(group, false, spans, options) }
    }

    fn header(&self) -> Result<Option<RequestHeader>> {
        let mut bytes = [0; HEADER_BYTES];
        // SAFETY: the memory has these bytes.
        unsafe { self.0.as_ptr().cast::<u8>().copy_to_nonoverlapping(bytes.as_mut_ptr(), HEADER_BYTES) };
        decode(&bytes)
    }

    fn elements(&self) -> *const u8 {
        self.0.as_ptr().cast::<u8>().wrapping_add(HEADER_BYTES)
    }
}

fn serve_requests(server: &Arc<ServerState>, answers: &mut VecDeque<Answer>) -> Result<()> {
    // Two: the next request arrives while one is applied.
    let [mut now, mut next] = [(); 2].map(|()| Inbox(vec![0; (HEADER_BYTES + CHUNK_BYTES) / 8]));
    let mut receive = now.receive(&server.group)?;
    loop {
        let status = receive.wait(None)?;
        let Some(header) = now.header()? else { return Ok(()) };
        receive = next.receive(&server.group)?;
        let handled = handle(server, status, &now, header, answers);
        if let Err(error) = handled {
            server.group.fail(&error);
            let _ended = receive.wait(None);
            return Err(error);
        }
        std::mem::swap(&mut now, &mut next);
    }
}

fn handle(
    server: &ServerState,
    status: Status,
    inbox: &Inbox,
    header: RequestHeader,
    answers: &mut VecDeque<Answer>,
) -> Result<()> {
    let RequestHeader { action, tensor, start, len, answer } = header;
    let malformed = || Error::Internal("a request to the parameter server is malformed".into());
    let stored = server.shards.layout().tensors().get(tensor).ok_or_else(malformed)?;
    let part = start..start.checked_add(len).ok_or_else(malformed)?;
    let bytes = len * stored.dtype.size();
    let elements = if action.sends_elements() { bytes } else { 0 };
    if part.end > server.shards.shard(tensor, server.rank).len()
        || len > CHUNK_BYTES / stored.storage().size()
        || status.bytes != HEADER_BYTES + elements
    {
        return Err(malformed());
    }
    let mut reply = vec![0; if action == Action::Receive { bytes } else { 1 }];
    let what_text = format!("a request of {} to the parameter server", server.group.rank_name(status.source));
    server.group.with_limits(&what_text, Timeout::GroupDefault, |wait| {
        // SAFETY: the lengths were compared above.
        unsafe {
            match action {
                Action::Send(rule) => server.shards.update(server.rank, tensor, part, rule, inbox.elements(), wait),
                Action::Receive => server.shards.read(server.rank, tensor, part, reply.as_mut_ptr(), wait),
            }
        }
    })?;
    while answers.front().is_some_and(|(answer, _)| answer.result().is_some()) {
        if let Some((answer, _memory)) = answers.pop_front() {
            answer.wait(None)?;
        }
    }
    let mut spans = Spans::default();
    spans.add(reply.as_mut_ptr(), reply.len())?;
    let options = MessageOptions {
        peer: Some(status.source),
        tag: Some(answer),
        name: "answer of the parameter server",
        ..MessageOptions::default()
    };
    // SAFETY: the memory is kept beside the message until it has ended.
    let sent = unsafe { message(&server.group, true, spans, options) }?;
    answers.push_back((sent, reply));
    Ok(())
}

/// Ends the thread of this rank's own requests.
pub(super) fn end(server: &ServerState) -> Result<()> {
    let mut bytes = header_bytes(None)?;
    let mut spans = Spans::default();
    spans.add(bytes.as_mut_ptr(), HEADER_BYTES)?;
    let options = MessageOptions {
        peer: Some(server.rank),
        tag: Some(REQUEST_TAG),
        name: "end of the parameter server",
        ..MessageOptions::default()
    };
    // SAFETY: the message has ended before this returns.
    unsafe { message(&server.group, true, spans, options) }?.wait(None).map(drop)
}
