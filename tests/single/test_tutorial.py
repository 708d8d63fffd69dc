"""Follows docs/tutorial.md: writes its files, makes its changes, types its commands, and sees what it says."""

from __future__ import annotations

import math
import platform
import re
import shlex
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from hosts import Hosts, possible
from imported import TORCH, python
from launch import Finished, run

PAGE = Path(__file__).resolve().parents[2] / "docs/tutorial.md"
ENVIRONMENT = {"DL_COMM_DUMP_DIR": "none"}
NUMBER = re.compile(r"\d+\.\d+|\d+")


def blocks(text: str) -> list[tuple[str, str, str]]:
    """The language, file and content of each block of code."""
    return re.findall(r'^```(\w+)(?: title="([^"]+)")?\n(.*?)^```$', text, re.MULTILINE | re.DOTALL)


def changed(script: str, diff: str) -> str:
    """The script after a change, whose other lines say where."""
    lines = [line if line else " " for line in diff.splitlines()]
    old, new = ("".join(f"{line[1:]}\n" for line in lines if not line.startswith(sign)) for sign in "+-")
    assert script.count(old) == 1, f"{script.count(old)} places for\n{diff}"
    return script.replace(old, new)


def alike(expected: str, line: str) -> bool:
    """Whether the lines differ in seconds, process numbers and the last digits of losses only."""

    def shape(text: str) -> str:
        text = re.sub(r"pid \d+|after \d+\.\d s", "<any>", text.replace(str(Path.cwd()) + "/", ""))
        return re.sub(r"\d+\.\d+", "<number>", text)

    numbers = [[float(each) for each in re.findall(r"\d+\.\d{5}", text)] for text in (expected, line)]
    return shape(expected) == shape(line) and all(
        math.isclose(*pair, rel_tol=0.05) for pair in zip(*numbers, strict=True)
    )


def check(expected: list[str], finished: Finished) -> None:
    """Each expected line is there, and no other unless "..." stands for it. Ranks and streams may take turns."""
    left = [line for line in finished.output.splitlines() if line.strip()]
    for wanted in (line for line in expected if line != "..."):
        found = [line for line in left if alike(wanted, line)]
        assert found, f"no line {wanted!r} in:\n{finished.output}"
        left.remove(found[0])
    assert not left or "..." in expected, "\n".join(["more lines than the page has:", *left, "of", finished.output])


def follow(
    commands: str,
    type_: Callable[[list[str]], Finished],
    names: dict[str, str],
    interpreter: Sequence[str] = (sys.executable,),
) -> int:
    """Types the commands of a block, and checks what they print. ``interpreter`` is typed for "python"."""
    for old, new in names.items():
        commands = commands.replace(old, new)
    steps = re.findall(r"^\$ (.*)\n((?:(?!\$ ).*\n)*)", commands, re.MULTILINE)
    for command, output in steps:
        words = shlex.split(command)
        finished = type_([each for word in words for each in (interpreter if word == "python" else [word])])
        assert not finished.timed_out, finished.output
        check(output.splitlines(), finished)
        assert (finished.returncode != 0) == ("failed first" in output), finished.output
    return len(steps)


def parts() -> list[str]:
    """The page up to its last section, and this section."""
    return re.split(r"^(?=## 7\. Two hosts$)", PAGE.read_text(), flags=re.MULTILINE)


def write(files: dict[str, str], language: str, name: str, content: str) -> None:
    """Writes a file of the page, or makes a change of it."""
    files[name] = content if language == "python" else changed(files[name], content)
    Path(name).write_text(files[name])


def test_the_tutorial(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From one process to two ranks."""
    monkeypatch.chdir(tmp_path)
    files: dict[str, str] = {}
    typed = 0
    for language, name, content in blocks(parts()[0]):
        if language == "console":
            names = {"node1": platform.node()}
            typed += follow(content, lambda words: run(words, 120, ENVIRONMENT), names, python(*TORCH))
        else:
            write(files, language, name, content)
    assert typed == 7


@pytest.mark.heavy
@pytest.mark.skipif(not possible(), reason="needs root and iproute2 to make network namespaces")
def test_its_two_hosts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The last section, on hosts of network namespaces."""
    monkeypatch.chdir(tmp_path)
    files: dict[str, str] = {}
    one_host, two_hosts = parts()
    for language, name, content in blocks(one_host):
        if language != "console":
            write(files, language, name, content)
    Path("model.pt").touch()  # The first command removes it.
    # The last block is the whole script.
    (console, _, commands), (_, name, script) = blocks(two_hosts)
    assert (console, script) == ("console", files[name])
    with Hosts(2) as hosts:
        names = dict(zip(("node1", "node2"), hosts.names, strict=True))
        through = f"dl-comm run --network eth0 --mpi-args {shlex.quote(hosts.ssh)}"
        commands = commands.replace("dl-comm run", through)
        assert follow(commands, lambda words: hosts.run(words, 120, ENVIRONMENT), names) == 3


def test_a_line_that_differs_is_seen() -> None:
    assert alike("epoch 5: loss 0.00743", "epoch 5: loss 0.00745")
    assert not alike("epoch 5: loss 0.00743", "epoch 5: loss 0.00943")
    assert not alike("epoch 5: loss 0.00743", "epoch 6: loss 0.00743")
    assert alike("failed first, after 5.2 s", "failed first, after 61.0 s")
    with pytest.raises(AssertionError, match="more lines"):
        check(["one"], Finished(0, "one\ntwo\n", False))
    with pytest.raises(AssertionError, match="no line 'two'"):
        check(["two", "..."], Finished(0, "one\n", False))
