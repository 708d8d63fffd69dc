"""For the tests that run on every rank of a job: ``mpiexec -n N python -m pytest tests/parallel``.

Each file runs on any number of ranks, each rank checks its own results. The first failure of a rank ends its run, and
the others hear of it at their next collective.

Tests with the fixture ``framework`` run for each that is installed, or those of ``--frameworks numpy,torch``. With
the fixture ``mode`` too they run in each mode of the framework. ``@pytest.mark.needs("out")``: for those that have it;
``@pytest.mark.modes("eager")``: in these.
"""

from __future__ import annotations

import gc
import importlib
import os
import sys
from collections.abc import Iterator

# Before any framework is imported: ranks outnumber the processors.
for variable in ("OMP_NUM_THREADS", "TF_NUM_INTRAOP_THREADS", "TF_NUM_INTEROP_THREADS"):
    os.environ.setdefault(variable, "1")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
os.environ.setdefault("DL_COMM_TIMEOUT_S", "100")
# Mismatches are reported earlier than by default, where they must be certain.
os.environ.setdefault("DL_COMM_MATCH_TIMEOUT_S", "4")
os.environ.setdefault("DL_COMM_DUMP_DIR", "none")

import pytest  # noqa: E402

import dl_comm as mc  # noqa: E402
import frameworks  # noqa: E402


@pytest.fixture(scope="session", autouse=True)
def _dl_comm() -> Iterator[None]:
    # The frameworks are imported, and have a million objects: neither collections of garbage nor the search for the
    # modules of an optimizer's parameters need to look at them again and again.
    if "torch" in sys.modules:
        importlib.import_module("torch._dynamo")  # by torch.optim, with half of them
    gc.collect()
    gc.freeze()
    mc.init(nthread_per_team=2, nteams=2)
    yield
    mc.finalize()
    # The end of the interpreter frees what it collects; a library of torch warns about the rest.
    gc.unfreeze()


@pytest.fixture
def rank() -> int:
    """This rank."""
    return mc.get_rank()


@pytest.fixture
def size() -> int:
    """The number of ranks."""
    return mc.get_nranks()


def pytest_report_header() -> str:
    """Says which rank this is."""
    mc.init_mpi()
    return f"rank {mc.get_rank()} of {mc.get_nranks()}, {mc.num_hosts()} host(s)"


def pytest_addoption(parser: pytest.Parser) -> None:
    """Chooses the frameworks."""
    names = ",".join(frameworks.KINDS)
    parser.addoption("--frameworks", metavar="NAMES", help=f"some of {names} (default: all that are installed)")


def pytest_configure(config: pytest.Config) -> None:
    """Describes the marks."""
    config.addinivalue_line("markers", "needs(*features): only for the frameworks that have these; see frameworks.py")
    config.addinivalue_line("markers", "modes(*modes): only in these")


@pytest.fixture
def framework(request: pytest.FixtureRequest) -> frameworks.Framework:
    """The framework under test."""
    return frameworks.get(request.param)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """A test for each framework, or each of its modes."""
    if "framework" not in metafunc.fixturenames:
        return
    needs = {feature for mark in metafunc.definition.iter_markers("needs") for feature in mark.args}
    kinds = [kind for kind in frameworks.KINDS.values() if needs <= kind.features]
    if "mode" in metafunc.fixturenames:
        only = metafunc.definition.get_closest_marker("modes")
        pairs = [(kind.name, mode) for kind in kinds for mode in kind.modes if not only or mode in only.args]
        metafunc.parametrize(("framework", "mode"), pairs, indirect=["framework"])
    else:
        metafunc.parametrize("framework", [kind.name for kind in kinds], indirect=True)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leaves out the frameworks that were not chosen. A chosen one that is not installed is an error."""
    everything = os.environ.get("DL_COMM_TEST_EVERYTHING")
    chosen = list(frameworks.KINDS) if everything else frameworks.installed()
    if option := config.getoption("frameworks"):
        chosen = option.replace(",", " ").split()
    if unknown := set(chosen) - set(frameworks.KINDS):
        raise pytest.UsageError(f"--frameworks: no framework {', '.join(sorted(unknown))}")

    def is_chosen(item: pytest.Item) -> bool:
        params = item.callspec.params if isinstance(item, pytest.Function) and hasattr(item, "callspec") else {}
        return params.get("framework", chosen[0]) in chosen

    config.hook.pytest_deselected(items=[item for item in items if not is_chosen(item)])
    items[:] = [item for item in items if is_chosen(item)]
