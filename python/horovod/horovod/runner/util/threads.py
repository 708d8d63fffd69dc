"""Functions in threads.

Thread rule: any thread.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext, suppress
from typing import Any


def in_thread(
    target: Callable[..., Any],
    args: tuple[Any, ...] = (),
    name: str | None = None,
    daemon: bool = True,
    silent: bool = False,
) -> threading.Thread:
    """Starts a thread that calls ``target(*args)``; returns it.

    Args:
        target: The function.
        args: Its arguments.
        name: The name of the thread.
        daemon: Whether the program may end before it.
        silent: Whether to drop exceptions.

    Raises:
        ValueError: ``args`` is no tuple.
    """
    if not isinstance(args, tuple):
        raise ValueError(f"args is a {type(args).__name__} (expected a tuple, such as (argument,))")

    def function() -> None:
        with suppress(BaseException) if silent else nullcontext():
            target(*args)

    thread = threading.Thread(target=function, name=name, daemon=daemon)
    thread.start()
    return thread


def on_event(
    event: threading.Event,
    func: Callable[..., Any],
    args: tuple[Any, ...] = (),
    stop: threading.Event | None = None,
    check_stop_interval_s: float = 1.0,
    daemon: bool = True,
    silent: bool = False,
) -> threading.Thread:
    """Starts a thread that calls ``func(*args)`` once ``event`` is set, unless ``stop`` is set before; returns it.

    Args:
        event: What it waits for.
        func: The function.
        args: Its arguments, a tuple.
        stop: Ends the wait.
        check_stop_interval_s: How often it looks at ``stop``, in seconds.
        daemon: Whether the program may end before it.
        silent: Whether to drop exceptions.

    Raises:
        ValueError: There is no event, or ``args`` is no tuple, or nothing could end a thread that is no daemon.
    """
    if event is None or not daemon and stop is None:
        raise ValueError("on_event needs an event, and a stop event for a thread that is no daemon")
    if not isinstance(args, tuple):
        raise ValueError(f"args is a {type(args).__name__} (expected a tuple, such as (argument,))")

    def function() -> None:
        while not event.wait(None if stop is None else check_stop_interval_s):
            if stop is not None and stop.is_set():
                return
        if stop is None or not stop.is_set():
            func(*args)

    return in_thread(function, daemon=daemon, silent=silent)


def execute_function_multithreaded(
    fn: Callable[..., Any],
    args_list: Sequence[Sequence[Any]],
    block_until_all_done: bool = True,
    max_concurrent_executions: int = 1000,
) -> dict[int, Any] | None:
    """Calls a function with each list of arguments, in threads.

    Args:
        fn: The function.
        args_list: The lists of arguments.
        block_until_all_done: Whether to wait for the results.
        max_concurrent_executions: The most threads.

    Returns:
        The results by the number of their list, or None without waiting.
    """
    pool = ThreadPoolExecutor(max(1, min(max_concurrent_executions, len(args_list))))
    futures = [pool.submit(fn, *args) for args in args_list]
    pool.shutdown(wait=block_until_all_done)
    return {i: future.result() for i, future in enumerate(futures)} if block_until_all_done else None
