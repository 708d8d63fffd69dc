"""The layers of the core (docs/architecture.md): which file may import which, and who names MPI and CUDA."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[2] / "core" / "src"
# From the bottom up: a file imports from its own layer and from those before it.
LAYERS = (
    "address_space affinity buffer cases clock codec config deadline device dtype error exit_status float_state folder "
    "fork group_config group_key hashed_map lock log pages reduce result_memory signals stacks stream_copy timeline "
    "timings topology variables wire_layout",
    "transport",
    "helper",
    "p2p",
    "collective",
    "group",
    "parameter_server plugin",
    "dump",
    "runtime",
    "process_info",
    "capi ffi",
)
# The settings name what each layer lets the user choose.
EXCEPTIONS = {("config", "collective"), ("config", "plugin"), ("group_config", "collective")}

Module = tuple[str, ...]


def module_of(path: Path) -> Module:
    parts = path.relative_to(SOURCE).with_suffix("").parts
    return parts[:-1] if parts[-1] in ("mod", "lib") else parts


MODULES = {module_of(path): path for path in sorted(SOURCE.rglob("*.rs"))}


def code(path: Path) -> str:
    """The source without its tests, comments and restricted visibilities."""
    text = re.split(r"#\[cfg\((?:all\()?test", path.read_text())[0]
    return re.sub(r"pub\(in [^)]*\)", "pub", re.sub(r"//[^\n]*", "", text))


def paths(tree: str) -> Iterator[list[str]]:
    """``a::{b, c::{d}}`` as [a, b], [a, c, d]."""
    found = re.fullmatch(r"((?:\w+\s*::\s*)*)\{(.*)\}", tree.strip(), re.DOTALL)
    if not found:
        yield [name.strip() for name in re.sub(r"\s+as\s+\w+", "", tree).split("::")]
        return
    head = [name.strip() for name in found[1].split("::") if name.strip()]
    depth, item = 0, ""
    for letter in found[2] + ",":
        if letter == "," and depth == 0:
            for path in paths(item) if item.strip() else ():
                yield head + path
            item = ""
        else:
            depth += (letter == "{") - (letter == "}")
            item += letter


def resolve(path: list[str], here: Module) -> Module | None:
    """The module that ``path`` names, seen from ``here``; None for another crate."""
    if path[0] == "crate":
        target: Module = tuple(path[1:])
    elif path[0] == "super":
        ups = next((index for index, name in enumerate(path) if name != "super"), len(path))
        target = here[: len(here) - ups] + tuple(path[ups:])
    elif (*here, path[0]) in MODULES:
        target = here + tuple(path)
    else:
        return None
    while target and target not in MODULES:
        target = target[:-1]
    return target


def imports(here: Module) -> set[Module]:
    text = code(MODULES[here])
    used = [path for tree in re.findall(r"\buse\s+([^;]+);", text) for path in paths(tree)]
    used += [path.split("::") for path in re.findall(r"\b(?:crate|super)(?:::\w+)+", text)]
    return {target for path in used if (target := resolve(path, here)) is not None} - {here}


IMPORTS = {module: imports(module) for module in MODULES}


def test_no_file_imports_itself_through_others() -> None:
    done: set[Module] = set()

    def visit(module: Module, trail: tuple[Module, ...]) -> None:
        assert module not in trail, " -> ".join("/".join(step) for step in (*trail[trail.index(module) :], module))
        if module not in done:
            for target in IMPORTS[module]:
                visit(target, (*trail, module))
            done.add(module)

    for module in MODULES:
        visit(module, ())


def test_imports_point_down() -> None:
    level = {name: index for index, names in enumerate(LAYERS) for name in names.split()}
    assert {module[0] for module in MODULES if module} == set(level), "each file of the core has a layer"
    wrong = [
        f"{'/'.join(module)} imports {'/'.join(target)}"
        for module, targets in IMPORTS.items()
        for target in targets
        if module and target and level[target[0]] > level[module[0]] and (module[0], target[0]) not in EXCEPTIONS
    ]
    assert not wrong


@pytest.mark.parametrize(("name", "folder"), [("mpi", "mpi"), ("cuda", "cuda")])
def test_one_folder_names(name: str, folder: str) -> None:
    """``transport/mod.rs`` declares both folders; the names of the C API and of variables are contracts."""
    home = SOURCE / "transport" / folder
    declarations = {f"mod {name};", f"pub use super::{name}::*;"}
    wrong = [
        f"{path.relative_to(SOURCE)}: {line.strip()}"
        for path in MODULES.values()
        if home not in path.parents
        for line in path.read_text().splitlines()
        if re.search(rf"\b{name}\b", line, re.IGNORECASE) and line.strip() not in declarations
    ]
    assert not wrong
