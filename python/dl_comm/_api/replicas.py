"""Compares the state of training on all ranks: models, optimizers, arrays.

Thread rule: collective: all ranks of the group call it in the same order. Any thread may call it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from dl_comm._api.averages import mark_of
from dl_comm._arrays.agreement import failing_together
from dl_comm._arrays.groups import Group, given
from dl_comm._arrays.objects import all_gather_object
from dl_comm._base.errors import DTypeError, MismatchError

_SHOWN = 5
"""How many differences an error lists."""
_Entry = tuple[str, bytes]
"""Part of an object: what an error says of it after its name, and what tells it from others."""
_NONE: _Entry = ("", b"")


def check_replicas(*objects: Any, group: Group | None = None) -> None:
    """Raises MismatchError unless all ranks have the same bits in a model, an optimizer, or arrays. Collective.

        dl_comm.check_replicas(model, optimizer)  # at the end of an epoch

    Args:
        *objects: Anything with a ``state_dict`` (torch's modules, optimizers, schedulers), models, layers and
            optimizers of Keras, arrays, tensors, numbers and texts, or dicts and lists of these. On GPUs, too.
        group: The ranks that take part; None: all.

    Raises:
        MismatchError: Ranks differ. All ranks raise the same text: names, types and shapes of what differs, and the
            ranks on which it is not what rank 0 has. Also if a rank raised one of the following.
        DTypeError: An object contains something that has no bits to compare.
        ArgumentError: A tensor is not dense, or an array is masked.
        StateError: ``init`` was not called, or ``finalize`` was.
    """
    members = given(group)
    with failing_together("check_replicas", members):
        own = dict(each for index, one in enumerate(objects) for each in _entries(one, _title(one, index, objects)))
    everyone = all_gather_object(own, group=members)
    names = dict.fromkeys(name for state in everyone for name in state)
    differences = [(name, ranks) for name in names if (ranks := _others(name, everyone))]
    if not differences:
        return
    lines = []
    for name, ranks in differences[:_SHOWN]:
        about, _ = everyone[ranks[0]].get(name) or everyone[0][name]
        lines.append(f"  {name}{about} of rank(s) {', '.join(map(str, ranks))}")
    more = len(differences) - len(lines)
    lines += [f"  and {more} more"] if more > 0 else []
    raise MismatchError("\n".join([f"{len(differences)} of {len(names)} entries are not those of rank 0:", *lines]))


def _others(name: str, everyone: list[dict[str, _Entry]]) -> list[int]:
    """The ranks whose entry is not that of rank 0."""
    marks = [state.get(name, _NONE)[1] for state in everyone]
    return [rank for rank, mark in enumerate(marks) if mark != marks[0]]


def _title(value: Any, index: int, objects: tuple[Any, ...]) -> str:
    return type(value).__name__ + (f" {index}" if len({type(each) for each in objects}) < len(objects) else "")


def _entries(value: Any, name: str) -> Iterator[tuple[str, _Entry]]:
    """The names of all that a value contains, and the entries."""
    if hasattr(value, "state_dict"):
        value = value.state_dict()
    elif hasattr(value, "variables") and not hasattr(value, "shape"):  # Keras
        value = list(value.variables)
    if isinstance(value, Mapping):
        for key, each in value.items():
            yield from _entries(each, f"{name}[{key!r}]")
    elif isinstance(value, (list, tuple)):
        for index, each in enumerate(value):
            yield from _entries(each, f"{name}[{index}]")
    elif hasattr(value, "shape") and hasattr(value, "dtype"):
        kind = str(value.dtype).rpartition(".")[2].removeprefix("<dtype: '").removesuffix("'>")
        # The names of Keras have numbers that differ between processes: they are said, but not compared.
        path = f" {value.path}" if hasattr(value, "path") else ""
        yield name, (f"{path} {kind}{list(value.shape)}", mark_of(value))
    elif value is None or isinstance(value, (bool, int, float, complex, str, bytes)):
        yield name, ("", repr(value).encode())
    else:
        raise DTypeError(f"{name} is a {type(value).__name__}; check_replicas compares arrays, numbers and texts")
