"""The package: its modules, `horovodrun`, `horovod.run`, the data loader, and the wheel beside another Horovod."""

from __future__ import annotations

import importlib
import inspect
import pickle
import re
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest
from hvd_ranks import PACKAGE, environment

MODULES = """
torch torch.mpi_ops torch.elastic torch.elastic.state torch.elastic.sampler torch.compression torch.functions
torch.optimizer torch.sync_batch_norm common common.util common.exceptions common.process_sets common.basics
common.elastic runner runner.launch runner.util.threads runner.common.util.env data data.data_loader_base
"""


def test_modules_are_where_scripts_import_them() -> None:
    for name in MODULES.split():
        importlib.import_module(f"horovod.{name}")
    for name in ("spark", "mxnet", "ray"):
        with pytest.raises(ImportError, match=f"no horovod.{name}"):
            importlib.import_module(f"horovod.{name}")


def test_the_page_lists_every_name() -> None:
    import horovod.torch as hvd

    page = (PACKAGE.parents[1] / "docs" / "horovod.md").read_text()
    listed = set(re.findall(r"`(\w+)`", page.partition("| `horovod.torch` |")[2].partition("| module |")[0]))
    assert set(hvd.__all__) <= listed
    assert all(hasattr(hvd, name) for name in hvd.__all__)


REDUCE = "average name op prescale_factor postscale_factor process_set"
SCATTER = "name op process_set prescale_factor postscale_factor"
OPTIMIZER = """
optimizer named_parameters compression backward_passes_per_step op gradient_predivide_factor num_groups groups
sparse_as_dense process_set
"""


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("allreduce", "tensor average name compression op prescale_factor postscale_factor process_set"),
        *((f"allreduce{form}", f"tensor {REDUCE}") for form in ("_", "_async", "_async_")),
        *((f"grouped_allreduce{form}", f"tensors {REDUCE}") for form in ("_", "_async", "_async_")),
        ("allgather", "tensor name process_set"),
        ("grouped_allgather_async", "tensors name process_set"),
        *((f"broadcast{form}", "tensor root_rank name process_set") for form in ("", "_", "_async", "_async_")),
        ("alltoall_async", "tensor splits name process_set"),
        ("reducescatter", f"tensor {SCATTER.replace('name', 'name compression')}"),
        ("grouped_reducescatter_async", f"tensors {SCATTER}"),
        ("broadcast_object", "obj root_rank name process_set"),
        ("DistributedOptimizer", OPTIMIZER),
    ],
)
def test_functions_take_the_arguments_of_horovod_in_its_order(name: str, arguments: str) -> None:
    import horovod.torch as hvd

    function = getattr(hvd, name)
    parameters = inspect.signature(function).parameters
    assert list(parameters) == arguments.split()
    assert parameters["process_set"].default is hvd.global_process_set
    assert function.__name__ == name
    assert function.__doc__
    assert pickle.loads(pickle.dumps(function)) is function  # so `horovod.run` takes functions that use it
    with pytest.raises(TypeError, match=f"{name}.* unexpected keyword argument 'colour'"):
        function(1, colour=2)
    with pytest.raises(TypeError, match=f"{name}.* multiple values for argument '{arguments.split()[0]}'"):
        function(1, **{arguments.split()[0]: 2})


def test_the_version_is_one_of_horovod() -> None:
    from packaging import version

    import horovod

    assert horovod.__version__.startswith("0.28.1+dl_comm")
    assert version.parse(horovod.__version__) >= version.parse("0.28.1")


def test_the_first_import_is_light() -> None:
    script = (
        "import sys, horovod; print([name for name in sys.modules if name in ('torch', 'numpy', 'dl_comm._dl_comm')])"
    )
    found = subprocess.run(
        [sys.executable, "-c", script], env=environment(), capture_output=True, text=True, check=True
    )
    assert found.stdout == "[]\n"


def test_helpers(monkeypatch: pytest.MonkeyPatch) -> None:
    from horovod.common import util
    from horovod.runner.common.util.env import get_env_rank_and_size
    from horovod.runner.util.threads import execute_function_multithreaded, in_thread

    assert util.split_list(list(range(7)), 3) == [[0, 1, 2], [3, 4], [5, 6]]
    assert [util.num_rank_is_power_2(n) for n in (0, 1, 6, 8)] == [False, True, False, True]
    assert util.extension_available("torch")
    assert not util.extension_available("mxnet")
    with pytest.raises(ImportError):
        util.check_extension("horovod.mxnet", "HOROVOD_WITH_MXNET", __file__, "mpi_lib")
    monkeypatch.setenv("HOROVOD_RANK", "2")
    monkeypatch.setenv("HOROVOD_SIZE", "4")
    assert get_env_rank_and_size() == (2, 4)
    found: list[int] = []
    in_thread(found.append, (1,)).join()
    assert found == [1]
    assert execute_function_multithreaded(lambda x: x * 2, [[1], [2]]) == {0: 2, 1: 4}
    with pytest.raises(ValueError, match="tuple"):
        in_thread(print, [1])  # type: ignore[arg-type]


def test_the_data_loader_reads_ahead() -> None:
    from horovod.data import AsyncDataLoaderMixin, BaseDataLoader

    class Loader(BaseDataLoader):
        def __init__(self, fails: bool = False) -> None:
            self.fails = fails

        def __len__(self) -> int:
            return 5

        def _iterate(self) -> Any:
            yield from range(5)
            if self.fails:
                raise KeyError("broken")

        def _process_batch(self, batch: Any) -> Any:
            return batch * 10

    class Ahead(AsyncDataLoaderMixin, Loader):
        pass

    for size in (0, 1, 64):
        loader = Ahead(async_loader_queue_size=size)
        for _ in range(3):
            assert list(loader) == [0, 10, 20, 30, 40]
        next(iter(loader))
        loader.close_async_loader()
        assert list(loader) == [0, 10, 20, 30, 40]
        loader.close_async_loader()
    with pytest.raises(KeyError, match="broken"):
        list(Ahead(2, False, True))
    assert list(Loader()) == [0, 10, 20, 30, 40]


def test_run_returns_the_results_of_the_ranks() -> None:
    import horovod

    script = """
import horovod
def train(a, b=0):
    import horovod.torch as hvd, torch
    hvd.init()
    return hvd.rank(), hvd.allreduce(torch.tensor([float(a + b)]), op=hvd.Sum).item()
if __name__ == "__main__":
    assert horovod.run(train, (1,), {"b": 2}, num_proc=2, hosts="localhost:2", use_gloo=True) == [(0, 6.0), (1, 6.0)]
    try: horovod.run(lambda: 1 / 0, num_proc=2)
    except RuntimeError as error: assert "ZeroDivisionError" in str(error)
    else: raise SystemExit("no error")
"""
    subprocess.run([sys.executable, "-c", script], env=environment(), check=True, timeout=120)
    with pytest.raises(ValueError, match="this host only"):
        horovod.run(print, hosts="elsewhere:2")
    with pytest.raises(ValueError, match="2 slots"):
        horovod.run(print, num_proc=3, hosts="localhost:2")
    with pytest.raises(NotImplementedError, match="min_num_proc"):
        horovod.run(print, min_num_proc=1)


def horovodrun(*arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "horovod.runner.launch", *arguments]
    return subprocess.run(command, env=environment(**env), capture_output=True, text=True, timeout=120)


def test_horovodrun(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        "import os, horovod.torch as hvd, torch; hvd.init()\n"
        "print('sum', hvd.allreduce(torch.ones(1), op=hvd.Sum).item(), os.environ['HOROVOD_CYCLE_TIME'],"
        " os.environ['HOROVOD_LOG_LEVEL'], os.environ.get('HOROVOD_AUTOTUNE'))\n"
    )
    config = tmp_path / "config.yaml"
    config.write_text("params:\n  cycle_time_ms: 10\nautotune:\n  enabled: true\nlogging:\n  level: INFO\n")
    options = [
        "-np",
        "2",
        "--config-file",
        str(config),
        "--cycle-time-ms",
        "2.5",
        "--output-filename",
        str(tmp_path / "o"),
    ]
    found = horovodrun(*options, sys.executable, str(script))
    assert found.returncode == 0, found.stderr
    assert found.stdout.count("sum 2.0 2.5 INFO 1") == 2
    assert horovodrun("-np", "2", sys.executable, "-c", "import sys; sys.exit(3)").returncode == 3
    checked = horovodrun("--check-build")
    assert "[X] PyTorch" in checked.stdout
    assert "[ ] MXNet" in checked.stdout
    assert "elastic" in horovodrun("-np", "2", "--min-np", "1", "python", "x.py").stderr


def test_options_become_those_of_the_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    from horovod.runner.launch import arguments

    monkeypatch.delenv("HOROVOD_RANK", raising=False)
    line = """
        -np 4 -H a:2,b:2 --network-interfaces eth0,eth1 --timeline-filename t.json --no-stall-check --verbose --gloo
        --fusion-threshold-mb 2 --disable-cache python train.py --np 3
    """
    words = arguments(line.split())
    assert words[:6] == ["-n", "4", "-H", "a:2,b:2", "--network", "eth0"]
    assert words[-4:] == ["python", "train.py", "--np", "3"]
    for setting in ("TIMELINE=t.json", "STALL_CHECK_DISABLE=1", "FUSION_THRESHOLD=2097152"):
        assert words[words.index(f"HOROVOD_{setting}") - 1] == "-x"


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "-w", str(folder), str(PACKAGE)]
    subprocess.run(command, check=True, timeout=200)
    (found,) = folder.glob("*.whl")
    return found


def test_a_real_horovod_comes_first(wheel: Path, tmp_path: Path) -> None:
    site = tmp_path / "site"
    with zipfile.ZipFile(wheel) as archive:
        assert {name.split("/")[0] for name in archive.namelist()} == {
            "dl_comm_horovod",
            "dl_comm_horovod.pth",
            f"{wheel.name.split('-')[0]}-{wheel.name.split('-')[1]}.dist-info",
        }
        archive.extractall(site)
    script = f"import site; site.addsitedir({str(site)!r}); import horovod; print(horovod.__file__)"
    env = {name: value for name, value in environment().items() if name != "PYTHONPATH"}

    def imported() -> str:
        return subprocess.run(
            [sys.executable, "-c", script], env=env, capture_output=True, text=True, check=True
        ).stdout

    assert imported().strip() == str(site / "dl_comm_horovod" / "horovod" / "__init__.py")
    (site / "horovod").mkdir()
    (site / "horovod" / "__init__.py").touch()
    assert imported().strip() == str(site / "horovod" / "__init__.py")
