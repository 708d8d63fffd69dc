"""A guard of torch's FileStore, which waits for its file for as long as its timeout, even if the file was removed.

Thread rule: any thread.
"""

from __future__ import annotations

import os
import sys
from typing import Any


def guarded(store: Any) -> Any:
    """The store, or, if its values are in a file, one whose methods raise FileNotFoundError once that file is gone."""
    inner = store
    while hasattr(inner, "underlying_store"):
        inner = inner.underlying_store
    # Without torch.distributed there is no such store.
    file_store: Any = getattr(sys.modules.get("torch.distributed"), "FileStore", None)
    if file_store is None or not isinstance(inner, file_store) or not os.path.exists(inner.path):
        return store
    return FileGuard(store, inner.path)


class FileGuard:
    """The methods of a store that dl_comm uses."""

    def __init__(self, store: Any, path: str) -> None:
        self._store, self._path, self._file = store, path, _identity(path)

    def _check_file(self) -> Any:
        if _identity(self._path) != self._file:
            raise FileNotFoundError(f"the file of the store, {self._path}, was removed")
        return self._store

    def set(self, key: str, value: Any) -> None:
        """Stores a value."""
        self._check_file().set(key, value)

    def get(self, key: str) -> bytes:
        """The value of a key that is there."""
        return bytes(self._check_file().get(key))

    def check(self, keys: list[str]) -> bool:
        """Whether the keys are there."""
        return bool(self._check_file().check(keys))

    def add(self, key: str, amount: int) -> int:
        """Adds to a number."""
        return int(self._check_file().add(key, amount))

    def delete_key(self, key: str) -> bool:
        """Removes a key."""
        return bool(self._check_file().delete_key(key))


def _identity(path: str) -> tuple[int, int] | None:
    try:
        about = os.stat(path)
    except FileNotFoundError:
        return None
    return about.st_dev, about.st_ino
