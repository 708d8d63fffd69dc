"""Helpers that scripts import from here.

Thread rule: any thread.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import tensorflow as tf

_executing_eagerly, _make_subgraph = tf.executing_eagerly, tf.function


def _cache(f: Callable[..., Any]) -> Callable[..., Any]:
    """Calls a function once for each list of arguments, and for eager mode and graphs apart."""
    cached = functools.cache(lambda eager, *args: f(*args))
    return lambda *args: cached(tf.executing_eagerly(), *args)


def vars_to_refs(vars: Any) -> Any:  # noqa: A002 - Horovod's name
    """The references of variables, which can be keys, as tuples for lists; Keras 3's variables are keys themselves."""
    if isinstance(vars, list):
        return tuple(map(vars_to_refs, vars))
    return vars.ref() if hasattr(vars, "ref") else vars


def refs_to_vars(refs: Any) -> Any:
    """The variables of what ``vars_to_refs`` returned."""
    if isinstance(refs, tuple):
        return [refs_to_vars(ref) for ref in refs]
    return refs.deref() if hasattr(refs, "deref") else refs
