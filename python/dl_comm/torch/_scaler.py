"""Loss scaling: lets torch's GradScaler wait for the averages before it looks at gradients.

`GradScaler.unscale_` writes gradients past autograd's version counter, so that nobody could notice afterwards, and
decides by what it finds whether to step, which must be the same on all ranks. torch has no hook there, so the method is
wrapped, for all scalers of the process; optimizers that do not average see no difference.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from torch.amp.grad_scaler import GradScaler

_METHOD = "_unscale_grads_"  # all ways to unscale or to look for infinities lead through it


def before_unscaling(prepare: Callable[[Any], None]) -> None:
    """Call `prepare` with the optimizer whenever a GradScaler is about to unscale its gradients."""
    plain = getattr(GradScaler, _METHOD, None)
    if plain is None:
        return

    @functools.wraps(plain)
    def unscale(self: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        prepare(optimizer)
        return plain(self, optimizer, *args, **kwargs)

    setattr(GradScaler, _METHOD, unscale)
