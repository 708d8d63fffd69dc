"""Simulates a call on many hosts, message by message. Pure.

Follows `core/src/collective/chunk_task.rs` and `core/src/collective/inter_host/`. The first chunk of a call includes
the handshake of the hosts. The other chunks are distributed over the channels, each with several chunks under way. A
channel is one thread of each rank, which does one thing at a time. The channels share the link and the memory of their
host. All ranks call at the same time.

A message occupies the sender's and the receiver's link at the same time, for the time of its bytes, when both are free
of earlier messages; the latency is added. Links are full duplex, and the network has no contention. All shards of a
host do the same at the same time.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from benchmarks.simulate.algorithms import LINE, Role, piece, run_algorithm
from benchmarks.simulate.cost import NetworkModel, best, chunks_under_way
from benchmarks.simulate.events import Clock, Process, Resource

_MIN_CHUNK_BYTES = 64 << 10


@dataclass(frozen=True)
class Host:
    """Constants of a host, in seconds.

    `add`: adding or copying a byte in cache, by one thread. `memory`: reading or writing a byte of the host's memory.
    `barrier_s`: a minimal call on one host, mostly the wait of its ranks for each other; used for the start of a call
    and for each barrier on a host.
    """

    add: float = 1e-10
    memory: float = 5e-11
    barrier_s: float = 2e-6


@dataclass(frozen=True)
class JobSpec:
    """A job: hosts and their network, `ranks` on each, and dl_comm's settings."""

    hosts: int
    network: NetworkModel
    host: Host = Host()
    ranks: int = 1
    channels: int = 2
    slot: int = 512 << 10
    """`DL_COMM_CHUNK_KB`, in bytes."""
    in_place: bool = False
    """Whether the tensors are in shared memory, so that all chunks but the first are read and written in place."""
    burst: float = 0.0
    """The bytes that an idle link sends before its rate applies (tc, not a real link)."""


@dataclass(frozen=True)
class Call:
    """An allreduce of `bytes` bytes; partial sums are `width` times as large (bfloat16: 2)."""

    bytes: int
    width: float = 1


@dataclass
class Outcome:
    """The result of a call: its time, and the data bytes and messages that the busiest host sends."""

    seconds: float = 0.0
    sent: float = 0.0
    messages: int = 0
    chunks: Counter[str] = field(default_factory=Counter)
    """Number of chunks for each algorithm."""


def chunks(job: JobSpec, call: Call) -> list[int]:
    """The lengths of the chunks, as in `core/src/collective/selection.rs`."""
    share = -(-call.bytes // (2 * job.channels))
    chunk = min(max(-(-share // LINE) * LINE, min(_MIN_CHUNK_BYTES, job.slot)), job.slot)
    return [min(chunk, call.bytes - start) for start in range(0, call.bytes, chunk)] or [0]


def limit(job: JobSpec, call: Call) -> float:
    """The time of the least bytes, in seconds.

    2 (n - 1) / n of the data on a host's link, or each tensor once in and out of memory: both work at the same time.
    """
    link = 2 * (job.hosts - 1) / job.hosts * call.bytes * job.network.byte_s
    return max(link, 2 * job.ranks * call.bytes * job.host.memory)


def simulate(job: JobSpec, call: Call, algorithm: str = "auto") -> Outcome:
    """Simulates a call on at least two hosts with an algorithm, or with dl_comm's choice for each chunk."""
    clock = Clock()
    roles = [Role.CORE] if job.hosts & (job.hosts - 1) == 0 else [Role.FOLDS_IN, Role.FOLDED_INTO]
    hosts = {kind: _Host(job, call, algorithm, clock, kind) for kind in roles}
    for host in hosts.values():
        host.peers = hosts
        clock.begin(host.lead())
    seconds = clock.run()
    busiest = max((host.outcome for host in hosts.values()), key=lambda outcome: outcome.sent)
    busiest.seconds = seconds
    return busiest


class _Host:
    """A host of one role: its link, its memory and its channels."""

    def __init__(self, job: JobSpec, call: Call, algorithm: str, clock: Clock, kind: Role) -> None:
        self.job, self.call, self.clock, self.kind = job, call, clock, kind
        self.algorithm = algorithm
        self.peers: dict[Role, _Host] = {}
        burst = job.burst * job.network.byte_s
        self.out, self.inward, self.memory, self.posting = Resource(burst), Resource(burst), Resource(), Resource()
        self.threads = [Resource() for _ in range(job.channels)]
        self.outcome = Outcome()
        self._chunks = chunks(job, call)
        self._window = chunks_under_way(job.hosts, self._chunks[0] // job.ranks)

    def lead(self) -> Process:
        """The call: its first chunk, then the others on all channels."""
        yield self.clock.now + self.job.host.barrier_s
        yield from self._pack(0)
        yield from self._transfer(0, matched=False)
        yield from self._unpack(0)
        for channel in range(self.job.channels):
            own = [chunk for chunk in range(channel, len(self._chunks), self.job.channels) if chunk > 0]
            for index in range(len(own)):
                self.clock.begin(self._run_chunk(own, index))

    def thread(self, chunk: int) -> Resource:
        """The thread of the chunk's channel, on every rank."""
        return self.threads[chunk % len(self.threads)]

    def _run_chunk(self, own: Sequence[int], index: int) -> Process:
        """A chunk of a channel: it is packed after those before it, and unpacked after them."""
        chunk, clock, window = own[index], self.clock, self._window
        if index >= window:
            yield (self.kind, "slot", own[index - window])
        if index > 0:
            yield (self.kind, "packed", own[index - 1])
        yield from self._idle_thread(chunk)
        yield from self._copy_in(chunk)
        if index + 1 < len(own):
            clock.deliver((self.kind, "packed", chunk), clock.now)
        yield from self._reduce(chunk)
        yield from self._transfer(chunk, matched=True)
        if index > 0:
            yield (self.kind, "done", own[index - 1])
        yield from self._unpack(chunk)
        if index + 1 < len(own):
            clock.deliver((self.kind, "done", chunk), clock.now)
        if index + window < len(own):
            clock.deliver((self.kind, "slot", chunk), clock.now)

    def _idle_thread(self, chunk: int) -> Process:
        """The chunks under way come first."""
        while (free := self.thread(chunk).free) > self.clock.now:
            yield free

    def _pack(self, chunk: int) -> Process:
        yield from self._copy_in(chunk)
        yield from self._reduce(chunk)

    def _copies(self, chunk: int) -> bool:
        """Whether the chunk goes through slots."""
        return chunk == 0 or not self.job.in_place

    def _copy_in(self, chunk: int) -> Process:
        """All ranks copy to their slots."""
        if self._copies(chunk):
            yield self._work(chunk, 2 * self.job.ranks * self._chunks[chunk], self._chunks[chunk])

    def _reduce(self, chunk: int) -> Process:
        """The ranks wait for each other, and reduce their shards."""
        yield from self._barrier()
        yield from self._idle_thread(chunk)
        length = self._chunks[chunk]
        yield self._work(chunk, (self.job.ranks + self.call.width) * length, length)

    def _unpack(self, chunk: int) -> Process:
        """All ranks copy from the slots; in place, the owners of the shards have written to all tensors."""
        length = self._chunks[chunk]
        if self._copies(chunk):
            yield from self._barrier()
            yield self._work(chunk, 2 * self.job.ranks * length, length)
        else:
            yield self._work(chunk, self.job.ranks * length, length)
            yield from self._barrier()

    def _work(self, chunk: int, all_ranks: float, one_rank: float) -> float:
        """The time when the host's memory has moved `all_ranks` bytes and a rank has processed `one_rank` bytes."""
        host, now = self.job.host, self.clock.now
        moved = self.memory.reserve(now, all_ranks * host.memory)
        return max(moved, self.thread(chunk).reserve(now, max(one_rank * host.add, moved - now)))

    def _barrier(self) -> Iterator[float]:
        if self.job.ranks > 1:
            yield self.clock.now + self.job.host.barrier_s

    def _transfer(self, chunk: int, matched: bool) -> Process:
        ranks, network = self.job.ranks, self.job.network
        slice_ = piece(self._chunks[chunk], ranks)
        algorithm = self.algorithm
        if algorithm == "auto":
            result_bytes = slice_ * ranks
            others = -(-(len(self._chunks) - 1) // self.job.channels)
            overlap = min(max(others, 1), self._window)
            partial_bytes = result_bytes * self.call.width
            algorithm = best(network, self.job.hosts, result_bytes, partial_bytes, not matched, self.job.ranks, overlap)
        self.outcome.chunks[algorithm] += 1
        return run_algorithm(_Shard(self, chunk, slice_), algorithm, matched)


class _Shard:
    """A shard of a chunk, for all shards of the host: see `algorithms.Shard`."""

    def __init__(self, host: _Host, chunk: int, length: int) -> None:
        self._host, self._chunk = host, chunk
        self.hosts = host.job.hosts
        # The hosts of a pair take turns, from chunk to chunk.
        turns = list(host.peers) if chunk % 2 == 0 else list(reversed(host.peers))
        self._of_role = dict(zip(turns, host.peers.values(), strict=True))
        self.role = next(role for role, peer in self._of_role.items() if peer is host)
        self.roles: Sequence[Role] = list(self._of_role)
        self.bytes, self.width, self.is_only = length, host.call.width, host.job.ranks == 1

    def send(self, to: Sequence[Role], stage: object, length: float, messages: int = 1, rounds: int = 1) -> Process:
        host, clock, ranks = self._host, self._host.clock, self._host.job.ranks
        network, outcome = host.job.network, host.outcome
        outcome.sent += messages * rounds * ranks * length
        outcome.messages += messages * rounds * ranks
        each = (LINE + length) * ranks * network.byte_s
        # Further messages are ready later, because the channels of a rank share one MPI library.
        posted = host.posting.reserve(clock.now, (messages - 1) * network.message_gap_s)
        # Hosts of one role send to each other; with two roles, each host receives from both.
        nearest = self._of_role[self.role if self.role in to else to[0]]
        last = max(line.reserve(clock.now, messages * rounds * each) for line in (host.out, nearest.inward))
        # The message itself also takes time on the link, unless the link has saved burst capacity.
        tail = 0.0 if host.job.burst else each
        arrived = max(last, posted + tail) + rounds * network.latency_s
        for kind in to:
            clock.deliver((kind, self.role, self._chunk, stage), arrived)
        if messages > 1:
            yield posted

    def receive(self, kind: Role, stage: object) -> Process:
        yield (self.role, kind, self._chunk, stage)

    def compute(self, length: float) -> Process:
        host = self._host
        yield host.thread(self._chunk).reserve(host.clock.now, length * host.job.host.add)
