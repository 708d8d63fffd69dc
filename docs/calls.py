"""For the reference: the arguments and the documentation that `dl_comm._base.made` gives to collectives and messages.

Griffe reads source text and runs nothing. So this extension reads the decorator of such a function, and makes of the
table of collectives what Python would make.
"""

from __future__ import annotations

import ast
import functools
import sys
import types
from contextlib import suppress
from pathlib import Path
from typing import Any

import griffe

SOURCES = Path(__file__).parents[1] / "python/dl_comm"
DECORATORS = ("made", "op_of")


def _module(name: str) -> types.ModuleType:
    """A file of the package that imports only files loaded before, without the package, which needs the core."""
    for package in ("dl_comm", "dl_comm._base"):
        sys.modules.setdefault(package, types.ModuleType(package))
    full, file = f"dl_comm._base.{name}", SOURCES / f"_base/{name}.py"
    if full not in sys.modules:
        module = sys.modules[full] = types.ModuleType(full)
        exec(compile((file).read_text(), str(file), "exec"), vars(module))
    return sys.modules[full]


TABLE, _, MADE = _module("table"), _module("errors"), _module("made")


@functools.cache
def _names(path: Path) -> dict[str, Any]:
    """What the decorators in a file use: the table, and the file's constants and functions that are made of it."""
    names: dict[str, Any] = {**vars(TABLE), **vars(MADE)}
    for statement in ast.parse(path.read_text()).body:
        if isinstance(statement, ast.FunctionDef) and not statement.decorator_list or isinstance(statement, ast.Assign):
            with suppress(NameError, AttributeError, TypeError):
                tree = ast.Module([ast.parse("from __future__ import annotations").body[0], statement], [])
                exec(compile(tree, str(path), "exec"), names)
    return names


class Calls(griffe.Extension):
    """Replaces the parameters and docstrings of functions that ``made`` makes, and documents the methods of groups."""

    def on_function_instance(self, *, node: Any, func: griffe.Function, agent: Any, **kwargs: Any) -> None:
        """The public function instead of the one that runs it."""
        del node, kwargs
        for decorator in func.decorators:
            found = ast.parse(str(decorator.value), mode="eval").body
            if isinstance(found, ast.Call) and ast.unparse(found.func) in DECORATORS:
                names = _names(Path(str(func.filepath)))
                call, *others = (eval(ast.unparse(argument), names) for argument in found.args)
                self._replace(func, agent, call, *others)

    def on_attribute_instance(self, *, node: Any, attr: griffe.Attribute, agent: Any, **kwargs: Any) -> None:
        """A method of a group, which is an attribute of the type of its call."""
        del node, agent, kwargs
        call = getattr(TABLE, str(attr.annotation), None)
        if isinstance(call, type) and issubclass(call, TABLE.Call):
            attr.docstring = griffe.Docstring(f"{call.__doc__} As ``dl_comm.{call.name}``.", parent=attr)

    def _replace(self, func: griffe.Function, agent: Any, call: Any, variant: Any = None) -> None:
        variant = variant or MADE.Variant()
        kinds = [(name, griffe.ParameterKind.positional_or_keyword) for name in variant.positional(call)]
        kinds += [(name, griffe.ParameterKind.keyword_only) for name in variant.keywords(call)]
        options = {name: variant.option(call, name) for name, _ in kinds}
        func.parameters = griffe.Parameters(
            *(
                griffe.Parameter(
                    name, annotation=options[name].annotation, kind=kind, default=options[name].default or None
                )
                for name, kind in kinds
            )
        )
        func.decorators.clear()
        parser = {"parser": agent.docstring_parser, "parser_options": agent.docstring_options}
        func.docstring = griffe.Docstring(MADE.documentation(call, variant), parent=func, **parser)
