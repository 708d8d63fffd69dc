"""Makes the public functions of a binding from the table of collectives, and their documentation.

Needs neither the core nor a framework. Thread rule: any thread.
"""

from __future__ import annotations

import functools
import linecache
import textwrap
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar, cast

from dl_comm._base.errors import REFUSALS, note_refusal
from dl_comm._base.table import COMMON, OPTIONS, Call, Option

_Call = TypeVar("_Call", bound=Call)


class Variant(NamedTuple):
    """How a binding's call differs from the table's.

    Attributes:
        without: Arguments that it lacks.
        more: Further keyword arguments.
        texts: Of arguments that mean something else.
        returns: The text of the result, if it is another.
        note: More about the call.
        library: The name of the array library in examples.
    """

    without: Sequence[str] = ()
    more: Mapping[str, Option] = {}
    texts: Mapping[str, str] = {}
    returns: str = ""
    note: str = ""
    library: str = "np"

    def positional(self, call: type[Call]) -> list[str]:
        """The arguments that may be given by position."""
        return [name for name in call.positional if name not in self.without]

    def keywords(self, call: type[Call]) -> list[str]:
        """The others."""
        return [*(name for name in call.keywords if name not in self.without), *self.more]

    def option(self, call: type[Call], name: str) -> Option:
        """The type, default and text of an argument."""
        found = self.more.get(name) or call.own.get(name) or OPTIONS[name]
        return found._replace(text=self.texts.get(name) or call.texts.get(name) or found.text)


_AS_IN_THE_TABLE = Variant()


def documentation(call: type[Call], variant: Variant = _AS_IN_THE_TABLE) -> str:
    """The docstring of a call, in Google's style."""
    names = [*variant.positional(call), *variant.keywords(call)]
    summary, _, more = call.summary.partition(". ")
    parts = [f"{summary}." if more else summary]
    parts += [more] if more else []
    parts += [variant.note] if variant.note else []
    parts.append(textwrap.indent(example_of(call, variant), "    "))
    sections = {
        "Args": {name: variant.option(call, name).text for name in names},
        "Raises": dict(call.errors),
    }
    listed = {
        title: f"{title}:\n" + "\n".join(_filled(f"{name}: {text}", 4) for name, text in entries.items())
        for title, entries in sections.items()
    }
    returns = f"Returns:\n{_filled(variant.returns or call.returns, 4, 4)}"
    return "\n\n".join(
        [
            *(part if part.startswith(" ") else _filled(part) for part in parts),
            listed["Args"],
            returns,
            listed["Raises"],
        ]
    )


def example_of(call: type[Call], variant: Variant = _AS_IN_THE_TABLE) -> str:
    """The example of a call, without lines that need what the binding lacks."""
    lines = textwrap.dedent(call.example).strip().replace("np.", f"{variant.library}.").splitlines()
    return "\n".join(line for line in lines if not any(f"{name}=" in line for name in variant.without))


@functools.cache  # the bindings have the same texts
def _filled(text: str, indent: int = 0, more: int = 8) -> str:
    following = " " * more if indent else ""
    return textwrap.fill(
        text,
        116,
        initial_indent=" " * indent,
        subsequent_indent=following,
        break_on_hyphens=False,
        break_long_words=False,
    )


def made(call: type[_Call], variant: Variant = _AS_IN_THE_TABLE) -> Callable[[Callable[..., Any]], _Call]:
    """A decorator: makes the public function of a call from one that runs it.

    That takes the call's own arguments by position, in the order of the table, then a tuple ``common`` with the values
    of ``COMMON`` (without those that the call has not): an option of all calls passes through one place of a binding.
    """

    def decorator(run: Callable[..., Any]) -> _Call:
        positional, keywords = variant.positional(call), variant.keywords(call)
        names = [*positional, *keywords]
        shared = [name for name in COMMON if name in keywords]
        own = tuple(name for name in names if name not in shared)
        taken = run.__code__.co_varnames[: run.__code__.co_argcount]
        if taken != (*own, "common"):
            raise TypeError(f"{run.__qualname__} takes {taken}, not {(*own, 'common')}")
        options = {name: variant.option(call, name) for name in names}
        parameters = [f"{name}={each.default}" if each.default else name for name, each in options.items()]
        if keywords:
            parameters.insert(len(positional), "*")
        arguments = ", ".join([*own, f"({''.join(f'{name}, ' for name in shared)})"])
        source = f"def {call.name}({', '.join(parameters)}):\n    return run({arguments})\n"
        filename = f"<{run.__module__}.{call.name}>"
        if call.code:  # no message
            start, body = source.split("\n", 1)
            source = f"{start}\n    try:\n    {body}    except refusals as error:\n        note(error)\n        raise\n"
        space: dict[str, Any] = {"run": run, "refusals": REFUSALS, "note": note_refusal, "__name__": run.__module__}
        exec(compile(source, filename, "exec"), space)
        # For tracebacks.
        linecache.cache[filename] = (len(source), None, source.splitlines(True), filename)
        function = space[call.name]
        function.__doc__ = documentation(call, variant)
        function.__annotations__ = {name: each.annotation for name, each in options.items()} | {"return": "Any"}
        return cast(_Call, function)

    return decorator
