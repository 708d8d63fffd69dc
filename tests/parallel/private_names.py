"""What the tests of the private names of torch and of TensorFlow share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

import dl_comm
from dl_comm._base import private_names
from dl_comm._base.private_names import PRIVATE_NAMES, PrivateName, check


def listed(framework: str) -> list[PrivateName]:
    """The names of a framework."""
    return [each for each in PRIVATE_NAMES if each.framework == framework]


def fails_without(monkeypatch: pytest.MonkeyPatch, gone: PrivateName, action: Callable[[], Any]) -> None:
    """Asserts that the action fails, and says what for, in a version that lacks a name."""
    with monkeypatch.context() as patch:
        patch.setattr(private_names, "PRIVATE_NAMES", (gone._replace(name="_gone"),))
        check.cache_clear()
        try:
            with pytest.raises(dl_comm.StateError, match=f"no _gone in {gone.where} any more, to {gone.purpose}"):
                action()
        finally:
            check.cache_clear()
