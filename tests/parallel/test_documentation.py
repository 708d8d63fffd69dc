"""The documentation of the calls, which the table of collectives makes: it is complete, and its examples run.

The examples are for two ranks.
"""

from __future__ import annotations

import importlib
import inspect
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import dl_comm
from dl_comm._base.table import CALLS, COLLECTIVES, Call, Recv, Send, SendRecv
from frameworks import Framework

LIBRARIES = {"numpy": "np", "torch": "torch", "tensorflow": "tf"}
"""The names of the array libraries in examples."""


def example(function: Any) -> str:
    """The code in a docstring, before its sections."""
    text, _, _ = inspect.cleandoc(function.__doc__).partition("\nArgs:")
    (code,) = re.findall(r"(?:^    .*\n?)+", text, re.MULTILINE)
    return inspect.cleandoc("\n" + code)


@pytest.mark.parametrize("call", CALLS, ids=lambda call: call.name)
def test_the_example_runs(call: type[Call], framework: Framework, tmp_path: Path) -> None:
    if dl_comm.size() != 2:
        pytest.skip("the examples are for two ranks")
    if framework.name == "tensorflow" and call in (Recv, Send, SendRecv):
        pytest.skip("TensorFlow's receive returns its tensors")
    library = LIBRARIES[framework.name]
    arrays = importlib.import_module(framework.name)
    code = example(getattr(framework.comm, call.name))
    assert f"{call.name}(" in code
    assert library == "np" or "np." not in code
    names = {"dl_comm": dl_comm, library: arrays, "epoch": 3, "folder": tmp_path / str(dl_comm.rank())}
    if call is Recv:  # the example receives what another rank sends
        dl_comm.send(arrays.ones((2, 3)), 1 - dl_comm.rank())
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


def test_each_argument_is_documented(framework: Framework) -> None:
    for call in COLLECTIVES:
        function = getattr(framework.comm, call.name)
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
