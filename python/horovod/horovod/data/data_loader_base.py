"""The base of data loaders, and a mixin that reads ahead in a thread.

    class Loader(AsyncDataLoaderMixin, BaseDataLoader):
        def _iterate(self):
            yield from batches

Thread rule: one thread iterates; `_iterate` runs in the thread of the mixin.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator
from contextlib import suppress
from typing import Any


class BaseDataLoader:
    """Iterates over the batches of ``_iterate``, each as ``_process_batch`` returns it."""

    def __len__(self) -> int:
        """The number of batches; a subclass has it."""
        raise NotImplementedError

    def _iterate(self) -> Iterator[Any]:
        """The batches of an epoch; a subclass has it."""
        raise NotImplementedError

    def __iter__(self) -> Iterator[Any]:
        """An epoch."""
        for batch in self._iterate():
            yield self._process_batch(batch)

    def _process_batch(self, batch: Any) -> Any:
        """What a trainer makes of a batch."""
        return batch


class _End:
    """The end of an epoch, with the exception of ``_iterate`` if it raised one."""

    def __init__(self, error: BaseException | None = None) -> None:
        self.error = error


class AsyncDataLoaderMixin:
    """Reads batches ahead in a thread, across the ends of epochs.

    Args:
        async_loader_queue_size: How many batches to keep; 0: no thread.
        debug_data_loader: Not used.
        args: Of the next class.
        kwargs: Of the next class.
    """

    def __init__(
        self, async_loader_queue_size: int = 64, debug_data_loader: bool = False, *args: Any, **kwargs: Any
    ) -> None:
        self.async_loader_queue_size, self.debug_data_loader = async_loader_queue_size, debug_data_loader
        self._loader_thread: threading.Thread | None = None
        super().__init__(*args, **kwargs)

    def close_async_loader(self) -> None:
        """Ends the thread; batches that it has read are dropped. The next iteration starts another one."""
        thread, self._loader_thread = self._loader_thread, None
        if thread is None:
            return
        self._closing.set()
        while thread.is_alive():
            with suppress(queue.Empty):
                self._batches.get(timeout=0.05)
        thread.join()

    def __iter__(self) -> Iterator[Any]:
        """An epoch. Raises what ``_iterate`` raises."""
        if self.async_loader_queue_size <= 0:
            for batch in self._iterate():  # type: ignore[attr-defined]
                yield self._process_batch(batch)  # type: ignore[attr-defined]
            return
        if self._loader_thread is None:
            self._closing = threading.Event()
            self._batches: queue.Queue[Any] = queue.Queue(self.async_loader_queue_size)
            arguments = (self._batches, self._closing)
            self._loader_thread = threading.Thread(target=self._read_ahead, args=arguments, daemon=True)
            self._loader_thread.start()
        while not isinstance(batch := self._batches.get(), _End):
            yield self._process_batch(batch)  # type: ignore[attr-defined]
        if batch.error is not None:
            self._loader_thread = None
            raise batch.error

    def _read_ahead(self, batches: queue.Queue[Any], closing: threading.Event) -> None:
        try:
            while not closing.is_set():
                for batch in self._iterate():  # type: ignore[attr-defined]
                    if closing.is_set():
                        return
                    batches.put(batch)
                batches.put(_End())
        except BaseException as error:
            batches.put(_End(error))
