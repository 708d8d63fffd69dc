"""Names of parameters for messages: those that they have in their modules.

Thread rule: any thread.
"""

from __future__ import annotations

import gc
from collections.abc import Iterable

import torch


def names_in_modules(parameters: Iterable[torch.Tensor]) -> dict[int, str]:
    """The names of parameters by their ids, as `named_parameters()` of the outermost module that holds them has them.

    An optimizer knows no modules, so this looks at all living ones. The shortest name counts if there are several.
    """
    wanted = {id(parameter) for parameter in parameters}
    # Not isinstance: it would ask proxies for their __class__, which may run code.
    modules = [each for each in gc.get_objects() if issubclass(type(each), torch.nn.Module)]
    names: dict[int, str] = {}
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
            found = list(module.named_parameters())
        except Exception:
            continue
        for name, parameter in found:
            known = names.get(id(parameter))
            if id(parameter) in wanted and (known is None or (len(name), name) < (len(known), known)):
                names[id(parameter)] = name
    return names
