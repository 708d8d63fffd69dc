"""The server of ``tests/imported.py``: Python imports this module before it runs a program.

In the server ``serve`` does not return. In each forked child it does, and the interpreter goes on to its program.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import runpy
import select
import signal
import socket
import sys
import traceback
from contextlib import suppress
from typing import Any

_WHOLE_LINES = os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "whole_lines/sitecustomize.py")
# It imports a package that prints a warning when the end of the interpreter does not collect its objects.
_COLLECTED = "torch._dynamo"


class _Program:
    """A child, and the connection of its client."""

    def __init__(self, child: int, connection: socket.socket) -> None:
        self.child, self.connection = child, connection
        self.ended = os.pidfd_open(child)


def serve(listener: socket.socket) -> tuple[dict[str, Any], list[int]]:
    """Forks a child for each client; returns in a child, with its request. Ends the process at the end of stdin."""
    poll = select.poll()
    for file in (0, listener.fileno()):
        poll.register(file, select.POLLIN)
    programs: dict[int, _Program] = {}  # by the files to poll
    while True:
        for file, _ in poll.poll():
            program = programs.get(file)
            if file == 0:
                for running in programs.values():
                    _kill(running, signal.SIGKILL)
                os._exit(0)
            elif file == listener.fileno():
                connection = listener.accept()[0]
                request, files = _receive(connection)
                if request is not None:
                    if (child := os.fork()) == 0:
                        listener.close()
                        for running in {id(each): each for each in programs.values()}.values():
                            running.connection.close()
                            os.close(running.ended)
                        connection.close()
                        return request, files
                    program = _Program(child, connection)
                    for number in (connection.fileno(), program.ended):
                        programs[number] = program
                        poll.register(number, select.POLLIN)
                for number in files:
                    os.close(number)
            elif program is None:
                continue  # it has just ended
            elif file == program.ended:
                status = os.waitpid(program.child, 0)[1]
                with suppress(OSError):
                    program.connection.sendall(status.to_bytes(4, "little"))
                for number in [number for number, other in programs.items() if other is program]:
                    poll.unregister(number)
                    del programs[number]
                program.connection.close()
                os.close(program.ended)
            elif given := _read(program.connection):
                _kill(program, given[0])
            else:
                # The client was killed: so is its program.
                poll.unregister(file)
                del programs[file]
                _kill(program, signal.SIGKILL)


def _read(connection: socket.socket) -> bytes:
    with suppress(OSError):
        return connection.recv(1)
    return b""


def _kill(program: _Program, number: int) -> None:
    with suppress(ProcessLookupError):
        os.kill(program.child, number)


def _receive(connection: socket.socket) -> tuple[dict[str, Any] | None, list[int]]:
    """What a client asks for, and its open files; None if it was killed."""
    files: list[int] = []
    with suppress(OSError):
        length, files, _, _ = socket.recv_fds(connection, 4, 100)
        left, text = int.from_bytes(length, "little"), b""
        while part := connection.recv(left - len(text)):
            text += part
        if text and len(text) == left:
            return json.loads(text), files
    return None, files


def _become(request: dict[str, Any], files: list[int]) -> None:
    """Makes this child what the client would be."""
    os.setsid()
    # First to numbers that no file has, as the new ones may be among the old ones.
    high = [os.dup2(file, 500 + index) for index, file in enumerate(files)]
    for file in files:
        os.close(file)
    for file, wanted in zip(high, request["files"], strict=True):
        os.dup2(file, wanted)
        os.close(file)
    before, now = (env.get("PYTHONPATH", "").split(os.pathsep) for env in (os.environ, request["environment"]))
    kept = [folder for folder in sys.path if folder in now or folder not in before]
    sys.path[:] = [folder for folder in now if folder and folder not in kept] + kept
    os.environ.clear()
    os.environ.update(request["environment"])
    os.chdir(request["folder"])
    if os.environ.get("PYTHONUNBUFFERED"):
        runpy.run_path(_WHOLE_LINES)
    sys.argv[sys.argv[:1] == ["-m"] :] = request["arguments"]
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed()


def run(names: dict[str, Any]) -> None:
    """Runs the script of the command line in the namespace of ``__main__``."""
    path = os.path.abspath(sys.argv[0])
    sys.path[0] = os.path.dirname(os.path.realpath(path))
    names["__file__"] = path
    with open(path, "rb") as file:
        text = file.read()
    exec(compile(text, path, "exec"), names)


def _freeze() -> None:
    """Lets children's collections of garbage ignore what there is, or else their ends would take a second each."""
    gc.collect()
    gc.freeze()


def _start(address: str, modules: list[str]) -> None:
    sys.path.remove(os.path.dirname(os.path.abspath(__file__)))
    for name in modules:
        if name == _COLLECTED:
            _freeze()
        importlib.import_module(name)
    assert len(os.listdir("/proc/self/task")) == 1, "a fork would lack threads"
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(address)
    listener.listen(100)
    if _COLLECTED not in modules:
        _freeze()
    os.write(1, b"ready\n")
    server = os.getpid()
    try:
        _become(*serve(listener))
    except BaseException:
        traceback.print_exc()
        os._exit(1 if os.getpid() == server else 125)


if given := os.environ.pop("DL_COMM_TEST_IMPORTED", None):
    _start(given.split()[0], given.split()[1:])
