"""The end of a backward pass: calls the reducers that got gradients in it, before `backward()` returns.

autograd has no public hook for that. Stock DDP and FSDP queue a callback in autograd's engine, and so does this.

Thread rule: that of autograd's hooks. Backward passes of several threads do not affect each other.
"""

from __future__ import annotations

import weakref
from typing import Protocol

import torch

from dl_comm import CommError

try:
    _queue_callback = torch.autograd.Variable._execution_engine.queue_callback
    _current_pass = torch._C._current_graph_task_id
except AttributeError as error:
    raise CommError(
        f"torch {torch.__version__} has no {error.name}, by which dl_comm knows when backward ends: "
        "use a version of torch that README.md lists"
    ) from error


class Participant(Protocol):
    """What wants to know when a backward pass ends."""

    def before_end(self) -> None:
        """Start what is still to be started; waits for no other rank."""

    def at_end(self) -> None:
        """Wait for what was started."""


class End:
    """The end of one backward pass. Only autograd's engine keeps it alive: it goes when the pass ends or fails."""

    def __init__(self) -> None:
        """Begin with no participants."""
        self._participants: list[weakref.ref[Participant]] = []

    def add(self, participant: Participant) -> None:
        """Call `participant` when the pass ends; not when it fails."""
        self._participants.append(weakref.ref(participant))

    def __call__(self) -> None:
        """End the pass. Raises what the first participant that failed has raised; the others end theirs."""
        waiting = [each for ref in self._participants if (each := ref()) is not None]
        failures: list[Exception] = []
        # Ranks may have the participants in different orders: all start before one waits, so that none waits for ever.
        for step in ("before_end", "at_end"):
            for each in list(waiting):
                try:
                    getattr(each, step)()
                except Exception as failure:
                    failures.append(failure)
                    waiting.remove(each)
        if failures:
            raise failures[0]


_ends: weakref.WeakValueDictionary[int, End] = weakref.WeakValueDictionary()


def join(participant: Participant) -> weakref.ref[End]:
    """Have `participant` called at the end of the backward pass that this thread is in; call it once a pass.

    The reference is dead after the pass, whether it ended or failed. Inside another backward pass (that of a reentrant
    checkpoint, say) it is the inner pass that counts.
    """
    number = _current_pass()
    end = _ends.get(number)
    if end is None:
        end = _ends[number] = End()
        _queue_callback(end)
    end.add(participant)
    return weakref.ref(end)
