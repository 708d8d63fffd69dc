"""Callbacks at the end of a backward pass: calls the reducers that got gradients, before `backward()` returns.

autograd has no public hook for this. DDP and FSDP queue a callback in autograd's engine; this module does the same.

Thread rule: as autograd's hooks. Backward passes of several threads do not affect each other.
"""

from __future__ import annotations

import weakref
from typing import Protocol

import torch

from dl_comm._base.errors import CommError

try:
    _queue_callback = torch.autograd.Variable._execution_engine.queue_callback
    _current_pass = torch._C._current_graph_task_id
except AttributeError as error:
    raise CommError(
        f"torch {torch.__version__} has no {error.name}, which dl_comm needs to detect the end of backward: "
        "use a version of torch that docs/wheels.md lists"
    ) from error


class Participant(Protocol):
    """A callback pair for the end of a backward pass."""

    def before_end(self) -> None:
        """Start the remaining calls; must not wait for other ranks."""

    def at_end(self) -> None:
        """Wait for the started calls."""


class End:
    """The end of one backward pass. Only autograd's engine keeps it alive, until the pass ends or fails."""

    def __init__(self) -> None:
        """Start without participants."""
        self._participants: list[weakref.ref[Participant]] = []
        self.is_marked = False

    def add(self, participant: Participant) -> None:
        """Call `participant` when the pass ends, but not when it fails."""
        self._participants.append(weakref.ref(participant))

    def __call__(self) -> None:
        """Run all participants, then raise the first exception of any."""
        waiting = [each for ref in self._participants if (each := ref()) is not None]
        failures: list[Exception] = []
        # Ranks may order the participants differently. All start before any waits: otherwise ranks could deadlock.
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
    """Call `participant` at the end of this thread's current backward pass. Use it once per pass.

    The returned reference is dead after the pass, whether it ended or failed. In nested backward passes (for example of
    a reentrant checkpoint) the innermost pass counts.
    """
    end = _end_of_pass()
    end.add(participant)
    return weakref.ref(end)


def mark_pass() -> None:
    """Mark this thread's current backward pass."""
    _end_of_pass().is_marked = True


def is_marked() -> bool:
    """Return whether this thread is in a backward pass that `mark_pass` has marked."""
    end = _ends.get(_current_pass())
    return end is not None and end.is_marked


def _end_of_pass() -> End:
    number = _current_pass()
    end = _ends.get(number)
    if end is None:
        end = _ends[number] = End()
        _queue_callback(end)
    return end
