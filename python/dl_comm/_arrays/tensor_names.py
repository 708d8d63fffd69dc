"""Names of tensors: how messages show them, and how the ranks compare them.

Ranks may list the same tensors in different orders, for example those of a set. Where the names are known, they match
the tensors by name. The core compares the names as part of each call's signature, which the ranks exchange anyway.

Thread rule: pure functions, except `agreed_order`, which is collective.
"""

from __future__ import annotations

import hashlib
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from dl_comm._arrays.collectives import all_gather
from dl_comm._arrays.groups import Group, world
from dl_comm._arrays.objects import all_gather_object
from dl_comm._base.errors import MismatchError

# As in core/src/collective/tensor_names.rs.
_SEPARATOR = "\x1f"
# What a line of a list of names may not have: control characters, halves of characters, and what escapes them.
_SPECIAL = re.compile(r"[\x00-\x1f\x7f\ud800-\udfff\\]")
# Names of each rank in a message.
_MAX_SHOWN = 8


class Name(str):
    """A name for messages, with the one that the ranks compare."""

    __slots__ = ("key",)

    key: str
    """What the ranks compare; empty if they match the tensor by its position."""

    def __new__(cls, name: str, key: str) -> Name:
        """Make a name from both."""
        made = super().__new__(cls, name)
        made.key = key
        return made


def labels(names: Iterable[str]) -> str:
    """Return the names of a call's tensors as the core takes them; each `Name` is compared between the ranks."""
    given = list(names)
    listed = list(map(_line, given))
    keys = [_line(name.key) if isinstance(name, Name) else "" for name in given]
    shown = "\n".join(listed) if any(listed) else ""
    if not any(keys):
        return shown
    return shown + _SEPARATOR + ("" if keys == listed else "\n".join(keys))


def by_name(named: Iterable[tuple[str, Any]]) -> list[tuple[Name, Any]]:
    """Sort tensors by name, so that all ranks have them in one order; equal names keep theirs."""
    pairs = list(named)
    return with_keys(pairs, relative([name for name, _ in pairs]))


def with_keys(named: Iterable[tuple[str, Any]], keys: Iterable[str]) -> list[tuple[Name, Any]]:
    """Sort tensors by the keys that the ranks compare; equal ones keep their order."""
    each = [(Name(name, key), tensor) for (name, tensor), key in zip(named, keys, strict=True)]
    return sorted(each, key=lambda pair: pair[0].key)


def relative(names: Sequence[str]) -> list[str]:
    """Return dotted names without the modules that hold all of them: a wrapper on one rank makes no difference."""
    paths = [name.split(".") for name in names]
    if len(paths) < 2:
        return list(names)
    first, last = min(paths), max(paths)
    shared = 0
    while shared < min(len(first), len(last)) - 1 and first[shared] == last[shared]:
        shared += 1
    return [".".join(path[shared:]) for path in paths]


def by_structure(paths: Sequence[str]) -> list[str]:
    """Return names without the numbers that a process gives to its layers: the nth of equal names gets number n.

    Keras calls a layer "dense_7" in one process and "dense_3" in another that has made fewer layers. Both are the first
    "dense" of their models.
    """
    parts: list[tuple[str, list[tuple[int, ...]]]] = []
    for path in paths:
        stem = ""
        numbers: list[tuple[int, ...]] = []  # of each word
        for mark, word in re.findall(r"([/_]?)([^/_]*)", path)[:-1]:
            if word.isdecimal() and numbers:
                numbers[-1] += (int(word),)
            else:
                stem += mark + word
                numbers.append(())
        parts.append((stem, numbers))
    places = sorted(range(len(parts)), key=lambda place: parts[place])
    keys = [""] * len(parts)
    count = 0
    for before, place in zip([None, *places], places, strict=False):
        stem = parts[place][0]
        if before is None or parts[before][0] != stem:
            count = 0
        elif parts[before] != parts[place]:
            count += 1
        keys[place] = f"{stem}#{count}" if count else stem
    return keys


def agreed_order(keys: Sequence[str], what: str, are_given: bool, group: Group | None = None) -> list[int] | None:
    """Return an order of tensors that is the same on all ranks of a group, as indices. Collective.

    None: the ranks match them by position.

    If all ranks list the same keys in the same order, it is that order; if they list them in different orders, the
    order by key. If they have different keys, they match tensors by position, unless that cannot be right: if the
    script gave the names (`are_given`, on any rank), if a key that occurs once has different positions, or if they have
    different numbers of tensors.

    Raises MismatchError, on all ranks, with the lists of the ranks.
    """
    listed = list(keys)
    group = world() if group is None else group
    if group.size == 1:
        return list(range(len(listed)))
    row = np.array([_digest(listed), _digest(sorted(listed)), are_given], np.int64)
    rows = all_gather(row, group=group, name=f"{what}: names").reshape(group.size, 3)
    if (rows[:, 0] == rows[0, 0]).all():
        return list(range(len(listed)))
    if (rows[:, 1] == rows[0, 1]).all() and len(set(listed)) == len(listed):
        return sorted(range(len(listed)), key=listed.__getitem__)
    lists = all_gather_object(listed, group=group)
    if rows[:, 2].any() or any(len(other) != len(listed) or _conflict(lists[0], other) for other in lists):
        raise MismatchError(_explain(lists, what))
    return None


def _line(name: str) -> str:
    """Return a name without special characters; other names give other lines."""
    return _SPECIAL.sub(lambda found: found.group().encode("unicode_escape", "surrogatepass").decode(), name)


def _digest(keys: Iterable[str]) -> int:
    text = "\n".join(map(_line, keys)).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little", signed=True)


def _conflict(these: Sequence[str], those: Sequence[str]) -> bool:
    often = {key for keys in (these, those) for key, number in Counter(keys).items() if number > 1}
    places = {key: place for place, key in enumerate(those)}
    return any(places.get(key, place) != place for place, key in enumerate(these) if key not in often)


def _explain(lists: Sequence[list[str]], what: str) -> str:
    first = min(
        place
        for place in range(max(map(len, lists)) + 1)
        if len({tuple(each[place : place + 1]) for each in lists}) > 1 or place >= max(map(len, lists))
    )
    start = max(0, min(first, max(map(len, lists)) - _MAX_SHOWN))
    lines = [f"the ranks have different tensors in {what}, or have them in orders that cannot be matched by name:"]
    by_text: dict[str, list[int]] = {}
    for rank, each in enumerate(lists):
        shown = ", ".join(each[start : start + _MAX_SHOWN]) or "(no more)"
        before, after = "... " * (start > 0), " ..." * (len(each) > start + _MAX_SHOWN)
        by_text.setdefault(f"{len(each)} tensors: {before}{shown}{after}", []).append(rank)
    lines += [f"  rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}: {text}" for text, ranks in by_text.items()]
    lines.append("give all ranks the same tensors, under the same names")
    return "\n".join(lines)
