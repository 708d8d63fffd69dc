"""The public names: each is listed by one module, and on one page of the reference; the others stay reachable."""

from __future__ import annotations

import ast
import importlib
import re
import warnings
from pathlib import Path
from types import ModuleType
from typing import get_args

import pytest

import dl_comm
import ml_comm
from dl_comm._api import names as api
from dl_comm._api import unlisted
from dl_comm._base.table import COLLECTIVES, OPERATORS, SCALED
from dl_comm.compat import cray, torchmpi

ROOT = Path(__file__).parents[2]
PYTHON = ROOT / "python"
# The modules that import no framework, and those that do.
PLAIN = (
    "dl_comm",
    "compat.cray",
    "compat.torchmpi",
    "compat.torchmpi.parameterserver",
    "compat.torchmpi.nn",
    "run",
    "timeline",
    "training",
    "tf1",
)
FRAMEWORKS = ("torch", "torch.nn", "tensorflow", "keras")
MODULES = tuple(name if name == "dl_comm" else f"dl_comm.{name}" for name in (*PLAIN, *FRAMEWORKS))


def pages() -> dict[str, list[str]]:
    """The names that the reference documents: by module, those of its page."""
    found = {}
    for page in (ROOT / "docs/api").glob("*.md"):
        module, *listed = re.findall(r"^::: (\S+)$", page.read_text(), re.MULTILINE)
        assert module not in found
        assert all(name.startswith(f"{module}.") for name in listed)
        found[module] = [name.removeprefix(f"{module}.") for name in listed]
    return found


def source(module: str) -> ast.Module:
    path = PYTHON / ("dl_comm/_api/names.py" if module == "dl_comm" else module.replace(".", "/"))
    path = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    return ast.parse(path.read_text())


def listed_by(module: str) -> list[str]:
    """The ``__all__`` of a module, which is not imported: it may need a framework."""
    (value,) = [
        each.value
        for each in source(module).body
        if isinstance(each, ast.Assign) and ast.unparse(each.targets[0]) == "__all__"
    ]
    names: list[str] = ast.literal_eval(value)
    return names


def re_exported_by(module: str) -> set[str]:
    """The names that a module has from outside of its package, and that are on the page of another public module."""
    others = [each for each in ("dl_comm", "dl_comm.training") if each != module]
    public = {name for each in others for name in listed_by(each)} | set(unlisted.__all__)
    names: set[str] = set()
    for each in source(module).body:
        if isinstance(each, ast.ImportFrom) and not str(each.module).startswith(f"{module}."):
            names |= {alias.name for alias in each.names}
    return names & public


def documented(module: str) -> set[str]:
    """The names of a module that its page must have."""
    names = {name for name in listed_by(module) if not name.startswith("_")}
    if module == "dl_comm":
        return names - {"run", "timeline", "training"}  # modules, with pages
    if module in ("dl_comm.compat.cray", "dl_comm.compat.torchmpi"):
        return names - set(api.__all__)
    if module == "dl_comm.torch":
        names.remove("nn")  # a module, with a page
    return names - re_exported_by(module)


def test_every_public_name_is_on_one_page() -> None:
    there = pages()
    assert set(there) == set(MODULES)
    for module, names in there.items():
        assert set(names) == documented(module), module
        assert len(set(names)) == len(names), module
    # All that `dl_comm` has, listed or not.
    everywhere = [
        name for module in ("dl_comm", "dl_comm.compat.cray", "dl_comm.compat.torchmpi") for name in there[module]
    ]
    modules = [name for name in api.__all__ if isinstance(getattr(dl_comm, name), ModuleType)]
    expected = [*api.__all__, *unlisted.__all__]
    assert sorted([*everywhere, *modules, "__version__", "core_id"]) == sorted(expected)


@pytest.mark.parametrize("name", MODULES[: len(PLAIN)])
def test_a_module_shows_its_names_only(name: str) -> None:
    module = importlib.import_module(name)
    if name != "dl_comm":
        assert set(dir(module)) == set(listed_by(name))
    assert list(module.__all__) == listed_by(name) + (unlisted.__all__ if name == "dl_comm" else [])
    # What a page lists exists, and has a text.
    for each in pages()[name]:
        assert each == "Operator" or (getattr(module, each).__doc__ or "").strip(), each


def test_the_package_shows_its_main_names() -> None:
    table = (ROOT / "docs/api/dl_comm.md").read_text().partition("## The main names")[2].partition("\n\n`dir")[0]
    assert set(re.findall(r"`(\w+)`", table)) == set(api.MAIN)
    assert set(api.MAIN) <= set(api.__all__)
    assert set(dir(dl_comm)) == {*api.MAIN, "__version__", "compat", "timeline", "training"}
    rows = re.findall(r"^\| (?:collectives|messages|Python objects) \| (.*) \|$", table, re.MULTILINE)
    methods = re.findall(r"`(\w+)`", "".join(rows))
    assert len(methods) == 15
    assert all(callable(getattr(dl_comm.Group, name)) for name in methods)


def test_the_type_of_operators_has_all() -> None:
    assert set(get_args(dl_comm.Operator)) == set(OPERATORS)


def test_names_of_other_libraries_stay_reachable() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for module in (cray, torchmpi):
            for name in module.__all__:
                assert getattr(module, name) is getattr(dl_comm, name)
        for name in (*api.__all__, *unlisted.__all__):
            assert name == "config_team" or getattr(ml_comm, name) is getattr(dl_comm, name), name
    others = {*cray.__all__, *torchmpi.__all__}
    assert set(unlisted.__all__) - {"core_id"} == others - set(api.__all__)
    # That package is for scripts of the plugin.
    assert set(ml_comm.__all__) == set(dir(ml_comm)) == others | set(api.__all__)


def test_a_star_imports_all_names() -> None:
    names: dict[str, object] = {}
    exec("from dl_comm import *", names)
    assert set(names) - {"__builtins__"} == {*api.__all__, *unlisted.__all__}


@pytest.mark.parametrize("page", sorted(path.name for path in (ROOT / "docs").glob("*.md")))
def test_pages_use_the_listed_names(page: str) -> None:
    used = set(re.findall(r"\bdl_comm\.([a-zA-Z]\w*)\b", (ROOT / "docs" / page).read_text()))
    assert used.isdisjoint(unlisted.__all__)


def test_the_table_has_the_codes_of_the_header() -> None:
    header = (ROOT / "core/include/dl_comm.h").read_text()

    def codes(type_of: str) -> dict[str, int]:
        (body,) = re.findall(rf"typedef enum {type_of} {{(.*?)}}", header, re.DOTALL)
        found = re.findall(r"DL_COMM_(\w+) = (\d+)", body)
        return {name.lower().replace("_", ""): int(code) for name, code in found}

    assert codes("dl_comm_collective") == {call.name.replace("_", ""): call.code for call in COLLECTIVES}
    operators = OPERATORS | {f"scaled_{name}": code for name, code in SCALED.items()}
    assert codes("dl_comm_reduce") == {name.replace("_", ""): code for name, code in operators.items()}
    assert set(get_args(dl_comm.Operator)) == set(OPERATORS)
