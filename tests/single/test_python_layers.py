"""The layers of the Python package (programs > names > bindings > levels > arrays > job > libraries > base)."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

PACKAGE = Path(__file__).parents[2] / "python/dl_comm"
LAYERS = (
    "_base _dl_comm analyze_dumps run",
    "_libraries build",
    "_job timeline",
    "_arrays training",
    "_levels",
    # Beside each other; Keras is on TensorFlow, and with its torch backend on torch.
    "_torch_distributed keras tensorflow torch",
    "_api",
    "__main__ compat doctor tf1",
)
"""From the bottom: the packages and files of each layer."""


def module_of(path: Path) -> str:
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module_of(path): path for path in sorted(PACKAGE.rglob("*.py"))}


def nodes(tree: ast.AST) -> Iterator[ast.AST]:
    """All that runs: also what stands in functions, but nothing for type checkers only."""
    for child in ast.iter_child_nodes(tree):
        if isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
            for other in child.orelse:
                yield other
                yield from nodes(other)
        else:
            yield child
            yield from nodes(child)


def imports(module: str) -> set[str]:
    found = set()
    for node in nodes(ast.parse(MODULES[module].read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module}: relative import"
            names = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= {name if name in MODULES or name == "dl_comm._dl_comm" else str(node.module) for name in names}
    return {name for name in found if name.split(".")[0] == "dl_comm"} - {module}


IMPORTS = {module: imports(module) for module in MODULES}


def layer_of(module: str) -> int:
    name = (module.split(".") + [""])[1]
    if module in ("dl_comm", "dl_comm.torch", "dl_comm.tensorflow", "dl_comm.keras"):
        name = "_api"  # they hand on the names of all layers
    found = [index for index, names in enumerate(LAYERS) if name in names.split()]
    assert len(found) == 1, f"{module} has no layer in {__file__}"
    return found[0]


def test_imports_point_down() -> None:
    wrong = [
        f"{module} imports {target}"
        for module, targets in IMPORTS.items()
        for target in targets
        if layer_of(target) > layer_of(module)
    ]
    assert not wrong


def test_no_file_imports_itself_through_others() -> None:
    done: set[str] = set()

    def visit(module: str, trail: tuple[str, ...]) -> None:
        assert module not in trail, " -> ".join((*trail[trail.index(module) :], module))
        if module not in done:
            for target in sorted(IMPORTS.get(module, ())):
                visit(target, (*trail, module))
            done.add(module)

    for module in MODULES:
        visit(module, ())


def test_torch_and_tensorflow_do_not_know_each_other() -> None:
    for one, others in (("torch", ("tensorflow", "keras")), ("tensorflow", ("torch",)), ("keras", ("torch",))):
        of_others = tuple(f"dl_comm.{other}" for other in others)
        for module, targets in IMPORTS.items():
            if module.startswith(f"dl_comm.{one}") and module != "dl_comm.keras._on_torch":
                assert not [target for target in targets if target.startswith(of_others)], module
