"""A parameter server for tensors of every framework that has writable ones.

Thread rule: any thread may call every method.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dl_comm._api.binding import binding_of
from dl_comm._arrays.groups import Group
from dl_comm._arrays.server import ArrayKind, Rule, Server
from dl_comm._base.errors import DTypeError


class ParameterServer(Server):
    """Tensors that any rank of a group reads and updates at any time, without the others taking part. Collective.

        server = dl_comm.ParameterServer(weights)
        server.send(update)  # adds it
        weights = server.receive()

    Each rank owns a shard of every tensor. On one host whoever sends an update applies it to the owner's memory, under
    a lock for each block of 64 KiB; between hosts a thread of the owner does, whatever its program does meanwhile.
    float16 and bfloat16 are kept as float32, so small updates are not rounded away. An update is applied once, and the
    values of a block are read whole; another rank may see some blocks of a longer update before the others. The
    operations of a rank take effect in their order. A lost rank or a passed deadline ends the server on all ranks. As a
    context manager it is closed at the end. Sources: Li et al., "Scaling Distributed Machine Learning with the
    Parameter Server", 2014; TorchMPI.

    Args:
        tensors: A NumPy array or a torch tensor, or a list of one kind, on all ranks with the same shapes and types,
            each with at least as many elements as there are ranks. Each shard begins with its owner's values:
            broadcast them first if they differ. GPU tensors go through pinned host memory.
        group: The ranks; None: all.
        rules: Rules in Python by name: ``rule(shard, update)`` changes ``shard``, a row of elements (float32 for half
            types), in place, block by block. A thread of the owner runs it, which needs the interpreter: such sends
            wait for their owners, and are slower than the rules of the core. The same names on all ranks.
        timeout: The deadline in seconds, 0 for no limit; None: the group's.

    Raises:
        ArgumentError: No tensors, or one with fewer elements than ranks; on all ranks.
        MismatchError, TimeoutError: Other tensors on another rank.
        DTypeError: TensorFlow tensors, which cannot be written.
        CommError: Too little shared memory on a rank, or a lost rank.
    """

    def __init__(
        self,
        tensors: Any,
        group: Group | None = None,
        *,
        rules: Mapping[str, Rule] | None = None,
        timeout: float | None = None,
    ) -> None:
        given = tensors if isinstance(tensors, (list, tuple)) else [tensors]
        binding = binding_of(given)
        if binding is not None and binding.ARE_IMMUTABLE:
            raise DTypeError(
                "a parameter server receives into its tensors, and TensorFlow's cannot be written: .numpy()"
            )
        super().__init__(ArrayKind() if binding is None else binding.server_kind(), tensors, group, rules, timeout)
