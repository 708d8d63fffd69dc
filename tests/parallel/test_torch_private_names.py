"""The list of private names: the installed torch has them all, and the source uses no other."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

import dl_comm  # noqa: E402
import dl_comm.torch as cdl  # noqa: E402
from dl_comm._base.private_names import PRIVATE_NAMES, PrivateName, is_there  # noqa: E402
from private_names import fails_without, listed  # noqa: E402

SOURCE = Path(dl_comm.__file__).parent
# Our own modules are imported by these names, and a module of torch has these tables, which its public methods fill.
ALLOWED = {path.stem for path in SOURCE.rglob("_*.py")} | {"_C", "_buffers", "_modules", "_parameters"}


def test_torch_has_them() -> None:
    assert [each for each in listed("torch") if not is_there(each)] == []


@pytest.mark.parametrize("gone", [each for each in listed("torch") if each.is_checked], ids=lambda each: each.name)
def test_an_optimizer_checks_them(gone: PrivateName, monkeypatch: pytest.MonkeyPatch) -> None:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1)
    fails_without(monkeypatch, gone, lambda: cdl.DistributedOptimizer(optimizer))


@pytest.mark.parametrize("folder", ["torch", "tensorflow", "keras"])
def test_the_source_uses_no_other(folder: str) -> None:
    """Attributes with an underscore, of objects that are not our own."""
    known = {each.name for each in PRIVATE_NAMES} | ALLOWED
    known |= {name for each in PRIVATE_NAMES for name in re.split("[.:]", each.where)}
    texts = {file: file.read_text() for file in sorted((SOURCE / folder).glob("*.py"))}
    ours = set(re.findall(r"(?:def|class) (_\w+)|\b(?:self|cls)\.(_\w+)", "".join(texts.values())))
    known |= {name for names in ours for name in names}
    for file, text in texts.items():
        used = re.findall(r"(?<!self)(?<!cls)(?<!_ops)(?<!groups)(?<!dl_comm)(?<!__)\.(_[a-zA-Z]\w*)", text)
        assert {name for name in used if not name.startswith("_dl_comm")} <= known, file
