"""What docs/sharp-bits.md says to do: the gradients of one process, and ranks that stay in phase."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import dl_comm as mc  # noqa: E402
import dl_comm.torch as cdl  # noqa: E402

PAGE = (Path(__file__).resolve().parents[2] / "docs/sharp-bits.md").read_text()


def codes(heading: str) -> list[str]:
    """The blocks of Python under a heading."""
    (section,) = re.findall(rf"^## {re.escape(heading)}\n(.*?)(?=^## |\Z)", PAGE, re.MULTILINE | re.DOTALL)
    return re.findall(r"^```python\n(.*?)^```$", section, re.MULTILINE | re.DOTALL)


def data(rank: int, size: int) -> list[tuple[Any, Any]]:
    """A batch of each rank, one longer than the other."""
    generator = torch.Generator().manual_seed(1)
    return [
        (torch.randn(3 + each, 4, generator=generator), torch.randn(3 + each, 1, generator=generator))
        for each in range(size)
    ]


@pytest.mark.parametrize(("number", "reduction"), [(0, "sum"), (1, "mean")])
def test_losses_that_are_sums(number: int, reduction: str, rank: int, size: int) -> None:
    code = codes("Losses that are sums")[number]
    batches = data(rank, size)
    model = torch.nn.Linear(4, 1)
    optimizer = cdl.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    x, y = batches[rank]
    names = {"torch": torch, "model": model, "x": x, "y": y, "size": size, "total": sum(len(x) for x, _ in batches)}
    exec(code, names)
    names["loss"].backward()
    single = torch.nn.Linear(4, 1)
    single.load_state_dict(model.state_dict())
    x, y = (torch.cat(parts) for parts in zip(*batches, strict=True))
    torch.nn.functional.mse_loss(single(x), y, reduction=reduction).backward()
    torch.testing.assert_close(model.weight.grad, single.weight.grad)
    del optimizer


def test_the_same_number_of_steps(rank: int, size: int) -> None:
    wrong, right = codes("Ranks with different numbers of steps")
    x = y = torch.arange(10 * size + 1)
    seen: list[Any] = []
    names = {"dl_comm": mc, "x": x, "y": y, "rank": rank, "size": size, "epochs": 2, "batch": 5}
    exec(wrong, names)
    assert len(names["x"]) == 10 + (rank == 0)
    exec(right, {**names, "x": x, "y": y, "step": lambda inputs, targets: seen.append(inputs)})
    assert mc.equal_on_all_ranks(torch.tensor([len(each) for each in seen]))
    joined = mc.all_gather_object(torch.cat(seen[: len(seen) // 2]).tolist())
    assert {sample for part in joined for sample in part} == set(x.tolist())


def test_loops_stay_in_phase(rank: int, size: int) -> None:
    _, right = codes("Loops that run out of phase")
    made: list[int] = []

    def step(batch: int) -> None:
        made.append(batch)
        assert mc.average(float(batch)) == batch  # all ranks are in the same round

    def kl(batch: int) -> float:
        return float(rank == size - 1 and len(made) % 3 == 0)

    exec(right, {"dl_comm": mc, "rollouts": range(3), "step": step, "kl": kl, "limit": 0.5})
    assert made == [0, 0, 0, 1, 1, 1, 2, 2, 2]


def test_a_decision_is_that_of_all(rank: int) -> None:
    _, right = codes("A decision of one rank")
    steps = 0
    for step in range(10):
        names = {"dl_comm": mc, "loss": torch.tensor(8.0 - step - rank), "target": 3.0, "done": True}
        exec(f"{right.replace('break', 'done = False')}", names)
        steps += 1
        if not names["done"]:
            break
    assert mc.equal_on_all_ranks(torch.tensor(steps))
    assert steps > 1
