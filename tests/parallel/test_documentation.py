"""The documentation of the calls, which the table of collectives makes: it is complete, and its examples run.

The examples are for two ranks.
"""

from __future__ import annotations

import ast
import inspect
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import dl_comm
from dl_comm._table import CALLS, COLLECTIVES, Call, Recv, Send, SendRecv


def functions(library: str) -> dict[str, Any]:
    """The functions of a binding by their names, and the library by the name that its examples have."""
    if library == "np":
        module, arrays = dl_comm, np
    elif library == "torch":
        arrays = pytest.importorskip("torch")
        module = __import__("dl_comm.torch").torch
    else:
        arrays = pytest.importorskip("tensorflow")
        module = __import__("dl_comm.tensorflow").tensorflow
    return {**{name: getattr(module, name) for name in dir(module)}, library: arrays}


def example(function: Any) -> str:
    """The code in a docstring, before its sections."""
    text, _, _ = inspect.cleandoc(function.__doc__).partition("\nArgs:")
    (code,) = re.findall(r"(?:^    .*\n?)+", text, re.MULTILINE)
    return inspect.cleandoc("\n" + code)


@pytest.mark.parametrize("library", ["np", "torch", "tf"])
@pytest.mark.parametrize("call", CALLS, ids=lambda call: call.name)
def test_the_example_runs(call: type[Call], library: str, tmp_path: Path) -> None:
    if dl_comm.size() != 2:
        pytest.skip("the examples are for two ranks")
    if library == "tf" and call in (Recv, Send, SendRecv):
        pytest.skip("TensorFlow's receive returns its tensors")
    found = functions(library)
    code = example(found[call.name])
    assert f"{call.name}(" in code
    assert library == "np" or "np." not in code
    ast.parse(code)
    names = {"dl_comm": dl_comm, library: found[library], "epoch": 3, "folder": tmp_path / str(dl_comm.rank())}
    if call is Recv:  # the example receives what another rank sends
        dl_comm.send(found[library].ones((2, 3)), 1 - dl_comm.rank())
    exec(code, names)


@pytest.mark.parametrize(
    ("name", "result", "shape"),
    [
        ("allreduce", "y", (4, 3)),
        ("broadcast", "weights", (10, 4)),
        ("scatter", "block", (2, 3)),
        ("reduce_scatter", "y", (2, 3)),
    ],
)
def test_the_comment_of_an_example_is_right(name: str, result: str, shape: tuple[int, ...]) -> None:
    if dl_comm.size() != 2:
        pytest.skip("the examples are for two ranks")
    code = example(getattr(dl_comm, name))
    assert f"# {shape}:" in code
    names: dict[str, Any] = {"np": np, "dl_comm": dl_comm, "epoch": 5 * dl_comm.rank()}
    exec(code, names)
    assert names[result].shape == shape
    if name == "broadcast":
        assert names["epoch"] == 0
        assert not names["weights"].any()


@pytest.mark.parametrize("library", ["np", "torch", "tf"])
def test_each_argument_is_documented(library: str) -> None:
    found = functions(library)
    for call in COLLECTIVES:
        function = found[call.name]
        text = inspect.cleandoc(function.__doc__)
        listed = text.partition("Args:")[2].partition("Returns:")[0]
        names = re.findall(r"^    (\w+): \S", listed, re.MULTILINE)
        assert names == list(inspect.signature(function).parameters), call.name
        assert "As for" not in text
        assert "Returns:" in text
        assert "Raises:" in text


def test_a_method_has_the_arguments_of_the_function_without_group() -> None:
    for call in CALLS:
        function, method = getattr(dl_comm, call.name), getattr(dl_comm.Group, call.name)
        expected = [name for name in inspect.signature(function).parameters if name != "group"]
        assert list(inspect.signature(method).parameters) == ["self", *expected]
        assert "group: " not in method.__doc__
