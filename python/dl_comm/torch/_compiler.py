"""Marks for ``torch.compile``, which do not import its compiler: that takes nearly as long as torch itself.

    @constant
    def number_of_ranks(): ...

Thread rule: any thread.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

from torch._compile import _disable_dynamo

AnyFunction = TypeVar("AnyFunction", bound=Callable[..., Any])


def constant(function: AnyFunction) -> AnyFunction:
    """As ``torch.compiler.assume_constant_result``: the compiler calls the function, and keeps its result."""
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


def uncompiled(function: AnyFunction) -> AnyFunction:
    """As ``torch.compiler.disable``: the function runs as it is. Its first call imports the compiler."""
    return cast(AnyFunction, _disable_dynamo(function))
