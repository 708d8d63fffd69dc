"""Formats the results of tests/gpu/quarter_hour.sh as they stand in docs/gpu.md.

    python tests/gpu/quarter_hour_table.py QUARTER_HOUR_JSON

Markdown: the card, date and versions; the steps with their numbers; the medians by path and size.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from table import markdown, size_text

NAMES = {
    "limit-copy": "the GPU's copy of as many bytes",
    "limit-pinned": "copies to pinned memory and back",
    "torch-nccl": "torch.distributed, NCCL",
}


def tables(results: Mapping[str, Any]) -> str:
    """The text for the page."""
    parts = [_machine(results), _steps(results["steps"])]
    if rows := _medians(results["steps"]):
        parts += ["Microseconds of an allreduce of float32 in place on 2 ranks that share the GPU, medians:", rows]
    return "\n\n".join(parts)


def _machine(results: Mapping[str, Any]) -> str:
    machine, versions = results["machine"], results["versions"]
    names = {"python": "Python", "dl_comm": "dl_comm", "torch": "torch", "NCCL": "NCCL"}
    software = ", ".join(f"{text} {versions[name]}" for name, text in names.items() if name in versions)
    gpus = "; ".join(machine["gpus"]) or "no GPU"
    driver = f", driver {machine['driver']}" if machine["driver"] else ""
    host = f"{machine['processors']} processors, Linux {machine['kernel']}"
    dry = " A dry run: no number is one of a GPU." if results["dry_run"] else ""
    return f"On {results['date'][:10]}: {gpus}{driver}; {host}; {software}.{dry}"


def _steps(steps: Sequence[Mapping[str, Any]]) -> str:
    rows = [("step", "result", "shows", "at most")]
    for step in steps:
        name = f"{step['number']} {step['what']}"
        if step["status"] == "left out":
            rows.append((name, f"left out: {step['why']}", "", ""))
            continue
        result = f"{step['status']}, {step['seconds']:.0f} s"
        for number in step["numbers"]:
            rows.append((name, result, f"{number['what']}: {_value(number)}", f"{number['at_most']:g}"))
            name, result = "", ""
    return markdown(rows)


def _value(number: Mapping[str, Any]) -> str:
    if number["value"] is None:
        return "**not measured**"
    value = f"{number['value']:.3g}"
    value += f" {number['unit']}" if number["unit"] else ""
    return f"**{value}**" if number["ok"] is False else value


def _medians(steps: Sequence[Mapping[str, Any]]) -> str:
    found = {}
    for step in steps:
        for contender, medians in step["medians"].items():
            # The settings of the step follow the first comma of its name.
            setting = step["what"].partition(", ")[2] if "MPS" in step["what"] else ""
            name = NAMES.get(contender, f"`{contender}`")
            found[f"{name}, {setting}" if setting else name] = {int(size): us for size, us in medians.items()}
    sizes = sorted({size for medians in found.values() for size in medians})
    if not sizes:
        return ""
    rows = [("", *map(size_text, sizes))]
    for name, medians in found.items():
        rows.append((name, *(f"{medians[size]:,.0f}" if size in medians else "" for size in sizes)))
    return markdown(rows)


def main(words: list[str]) -> int:
    """The command line."""
    if len(words) != 1:
        print(__doc__, file=sys.stderr)
        return 2
    print(tables(json.loads(Path(words[0]).read_text())))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
