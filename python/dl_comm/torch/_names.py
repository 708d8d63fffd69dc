"""Names of an optimizer's parameters, and the order in which all ranks have them.

Thread rule: as torch optimizers, one thread at a time.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterable, Iterator, Mapping
from itertools import compress
from typing import Any, NamedTuple

import torch

from dl_comm._arrays.groups import Group
from dl_comm._arrays.tensor_names import Name, agreed_order, relative
from dl_comm._base.errors import CommError
from dl_comm.torch._arguments import refuse_lazy
from dl_comm.torch._bucket_plan import Named

_ATTRIBUTE = "_dl_comm_names"


class _Known(NamedTuple):
    parameter: weakref.ref[torch.Tensor]
    name: Name
    place: int


class ParameterNames:
    """The names of an optimizer's parameters, and their order, which is the same on all ranks.

    A name is the given one, that of the optimizer, or that in the modules that hold the parameter.
    """

    def __init__(
        self,
        given: Iterable[tuple[str, torch.Tensor]] | Mapping[str, torch.Tensor] | None,
        what: str,
        group: Group | None = None,
    ) -> None:
        """Store the given names. `what` names the optimizer in messages, the same on all ranks of `group`."""
        pairs = given.items() if isinstance(given, Mapping) else given or ()
        self._given = [(name, weakref.ref(parameter)) for name, parameter in pairs]
        self._what, self.group = what, group
        self._known: dict[int, _Known] = {}
        self._new: list[torch.Tensor] = []  # found, and not agreed on
        self._are_given = True  # the names of these
        self._places = 0  # the number of places given
        self._is_list_order = True  # the order of all ranks is that of this rank's optimizer

    def find(self, optimizer: torch.optim.Optimizer) -> None:
        """Find the names of new parameters. They have the order of the optimizer's list until `agree`."""
        new = [(name, parameter) for name, parameter in _listed(optimizer) if self._of(parameter) is None]
        given = _given_names(optimizer, self._given)
        unnamed = [parameter for _, parameter in new if id(parameter) not in given]
        found = {**(names_in_modules(unnamed) if unnamed else {}), **given}
        self._are_given = not unnamed
        self._new = [parameter for _, parameter in new]
        for name, parameter in new:
            refuse_lazy(parameter, str(found.get(id(parameter), name)))
            known = _Known(weakref.ref(parameter), Name(found.get(id(parameter), name), ""), self._places)
            self._known[id(parameter)] = known
            self._places += 1

    def agree(self) -> None:
        """Put the parameters that `find` has found in the order that all ranks have. Collective.

        Raises MismatchError on all ranks, as `agreed_order`; the parameters are unknown then.
        """
        new, self._new = self._new, []
        if not new:
            return
        names = [self._known[id(parameter)].name for parameter in new]
        keys = relative(names)
        try:
            order = agreed_order(keys, self._what, self._are_given, self.group)
        except CommError:
            for parameter in new:
                del self._known[id(parameter)]
            raise
        if order is None:
            return
        for place, i in enumerate(order, self._places):
            self._known[id(new[i])] = _Known(weakref.ref(new[i]), Name(names[i], keys[i]), place)
        self._places += len(new)
        self._is_list_order &= order == list(range(len(new)))

    def named(self, optimizer: torch.optim.Optimizer) -> Named:
        """Return the parameters with their names, in the order of all ranks."""
        found: list[tuple[int, str, torch.Tensor]] = []
        for name, parameter in _listed(optimizer):
            known = self._of(parameter)
            place = self._places if known is None else known.place
            found.append((place, name if known is None else known.name, parameter))
        if not self._is_list_order:
            found.sort(key=lambda each: each[0])
        return [(name, parameter) for _, name, parameter in found]

    def _of(self, parameter: torch.Tensor) -> _Known | None:
        known = self._known.get(id(parameter))
        # Another parameter may have had this id.
        return known if known is not None and known.parameter() is parameter else None


def names_of(optimizer: torch.optim.Optimizer, what: str, group: Group | None = None) -> ParameterNames:
    """Return the names that `keep_names` has kept, or make new ones, on which the ranks of `group` agree."""
    return kept_names(optimizer) or ParameterNames(None, what, group)


def kept_names(optimizer: torch.optim.Optimizer) -> ParameterNames | None:
    """Return the names that `keep_names` has kept."""
    found = optimizer.__dict__.get(_ATTRIBUTE)
    return found if isinstance(found, ParameterNames) else None


def keep_names(optimizer: torch.optim.Optimizer, names: ParameterNames) -> None:
    """Keep the names of an optimizer for `names_of`."""
    optimizer.__dict__[_ATTRIBUTE] = names


def _listed(optimizer: torch.optim.Optimizer) -> list[tuple[str, torch.Tensor]]:
    # By identity: a group may contain a parameter twice (torch warns).
    found: dict[int, tuple[str, torch.Tensor]] = {}
    for g, group in enumerate(optimizer.param_groups):
        for i, parameter in enumerate(group["params"]):
            found.setdefault(id(parameter), (f"group{g}.parameter{i}", parameter))
    return list(found.values())


def _given_names(
    optimizer: torch.optim.Optimizer, given: Iterable[tuple[str, weakref.ref[torch.Tensor]]]
) -> dict[int, str]:
    names: dict[int, str] = {}
    for group in optimizer.param_groups:
        # Set if the optimizer was created from (name, parameter) pairs.
        for name, parameter in zip(group.get("param_names") or (), group["params"], strict=False):
            names.setdefault(id(parameter), name)
    living: list[tuple[str, Any]] = [(name, parameter()) for name, parameter in given]
    names.update((id(parameter), name) for name, parameter in living if parameter is not None)
    return names


def names_in_modules(parameters: Iterable[torch.Tensor]) -> dict[int, str]:
    """The names of parameters by their ids, as `named_parameters()` of the outermost module that holds them has them.

    An optimizer knows no modules, so this looks at all living ones. If several have a parameter, the name in the one
    that holds most of the parameters counts, and the shortest one of these.
    """
    wanted = {id(parameter) for parameter in parameters}
    # By the type's id: isinstance asks proxies for their __class__, which may run code, and takes three times as long.
    classes = {id(cls) for cls in _with_subclasses(torch.nn.Module)}
    objects = gc.get_objects()
    modules = list(compress(objects, map(classes.__contains__, map(id, map(type, objects)))))
    del objects
    names: dict[int, tuple[int, int, str]] = {}
    inner: set[int] = set()
    for module in modules:
        try:
            inner.update(map(id, module.children()))
        except Exception:
            continue  # its own methods fail, or it is not complete: only names in messages are lost
    for module in modules:
        if id(module) in inner:
            continue
        try:
            found = [(name, id(parameter)) for name, parameter in module.named_parameters() if id(parameter) in wanted]
        except Exception:
            continue
        for name, parameter in found:
            rated = (-len(found), len(name), name)
            names[parameter] = min(rated, names.get(parameter, rated))
    return {parameter: name for parameter, (_, _, name) in names.items()}


def _with_subclasses(cls: type) -> Iterator[type]:
    yield cls
    subclasses: list[type] = type.__subclasses__(cls)
    for subclass in subclasses:
        yield from _with_subclasses(subclass)
