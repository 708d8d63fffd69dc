"""The random generators of all ranks in a checkpoint.

Texts, because every format of checkpoints can keep them, also that of ``torch.load(weights_only=True)``.

Thread rule: collective functions: all ranks of the group call them in the same order. A generator must not be in use.
"""

from __future__ import annotations

import json
import random
import sys
from typing import Any

import numpy as np

from dl_comm._arrays.agreement import failing_together
from dl_comm._arrays.groups import Group, given
from dl_comm._arrays.objects import all_gather_object
from dl_comm._base.errors import ArgumentError


def random_states(*, group: Group | None = None) -> list[str]:
    """The states of the random generators of all ranks, by rank, for a checkpoint. Collective.

        states = dl_comm.random_states()  # before rank 0 alone writes
        dl_comm.torch.save_checkpoint("model.pt", model=model, random=states)

    The generators are those of Python's ``random``, of ``numpy.random``, and of torch, if it is imported: that of the
    CPU, and that of the current GPU, if one is in use. Generators of your own, and those of Keras, which are variables
    of the model, are saved as usual. Operations of TensorFlow with a global seed keep their state to themselves.

    Args:
        group: The ranks that take part; None: all.

    Returns:
        A text for each rank, of some 20 KB.

    Raises:
        MismatchError: The ranks issued different collectives.
        StateError: ``init`` was not called, or ``finalize`` was.
    """
    members = given(group)
    with failing_together("random_states", members):
        own = json.dumps(_states())
    return all_gather_object(own, group=members)


def set_random_states(states: list[str], *, group: Group | None = None) -> None:
    """Sets the random generators of this rank to its entry of ``random_states``. Not collective.

    Args:
        states: The result of ``random_states`` on as many ranks.
        group: The ranks of which this rank's number counts; None: all.

    Raises:
        ArgumentError: The list is not from that many ranks, or an entry is not a state. Nothing was set. To go on with
            another number of ranks, seed the generators again: ``dl_comm.training.seed_rank``.
    """
    members = given(group)
    if not isinstance(states, (list, tuple)) or len(states) != members.size:
        count = len(states) if isinstance(states, (list, tuple)) else type(states).__name__
        raise ArgumentError(
            f"invalid states: those of {count} ranks (expected {members.size}; with another number of ranks, call "
            "training.seed_rank instead)"
        )
    try:
        found = json.loads(states[members.rank])
        version, keys, gauss = found["python"]
        kind, *others = found["numpy"]
        numpy_state = (kind, np.array(others[0], np.uint32), *others[1:])
    except (TypeError, ValueError, KeyError, IndexError) as error:
        raise ArgumentError(f"invalid states: entry {members.rank} is not one of random_states") from error
    random.setstate((version, tuple(keys), gauss))
    np.random.set_state(numpy_state)
    torch = sys.modules.get("torch")
    if torch is None:
        return
    if "torch" in found:
        torch.set_rng_state(_tensor(torch, found["torch"]))
    if "cuda" in found and torch.cuda.is_available():
        torch.cuda.set_rng_state(_tensor(torch, found["cuda"]))


def _states() -> dict[str, Any]:
    kind, keys, *others = np.random.get_state()
    found = {"python": random.getstate(), "numpy": [kind, np.asarray(keys).tolist(), *others]}
    torch = sys.modules.get("torch")
    if torch is not None:
        found["torch"] = torch.get_rng_state().numpy().tobytes().hex()
        if torch.cuda.is_initialized():
            found["cuda"] = torch.cuda.get_rng_state().numpy().tobytes().hex()
    return found


def _tensor(torch: Any, text: str) -> Any:
    return torch.frombuffer(bytearray.fromhex(text), dtype=torch.uint8)
