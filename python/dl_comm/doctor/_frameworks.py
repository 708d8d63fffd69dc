"""Checks the frameworks: installed, tested version, importable, operations built."""

from __future__ import annotations

from typing import Any

from dl_comm._build import existing_library
from dl_comm._frameworks import FRAMEWORKS, framework_version, is_installed
from dl_comm.doctor._checks import Check
from dl_comm.doctor._probes import Failed, Probe
from dl_comm.doctor._tested import is_tested, tested_text


class Frameworks:
    """The checks of this file. The constructor starts the imports; ``check`` waits for them.

    Args:
        imports: Whether to import the frameworks and their built operations, each in a separate process.
    """

    def __init__(self, imports: bool) -> None:
        self._installed = [framework for framework in FRAMEWORKS if is_installed(framework)]
        self._libraries = {framework: existing_library(framework) for framework in self._installed}
        self._probes = {}
        for framework in self._installed if imports else ():
            operations = "operations" if self._libraries[framework] else "none"
            self._probes[framework] = Probe("framework", framework, operations)

    def check(self) -> list[Check]:
        """The checks."""
        checks = []
        for framework in FRAMEWORKS:
            if framework in self._installed:
                checks += [self._version(framework), self._operations(framework)]
            else:
                checks.append(Check("frameworks", framework, "ok", "not installed", {"installed": False}))
        return checks

    def _version(self, framework: str) -> Check:
        distribution, _, version = framework_version(framework).rpartition("-")
        tested = tested_text(framework)
        facts: dict[str, Any] = {"installed": True, "distribution": distribution, "version": version, "tested": tested}
        text = f"{distribution} {version}"
        if probe := self._probes.get(framework):
            try:
                facts |= probe.result()
            except Failed as error:
                facts["error"] = str(error)
                what = f"importing {framework}" + " and dl_comm's operations for it" * bool(self._libraries[framework])
                return Check("frameworks", framework, "bad", f"{text}: {what} {error}", facts)
            text += f", imported in {facts['import_s']} s"
            text += f", built for CUDA {facts['cuda_build']}" if facts["cuda_build"] else ", for the CPU"
        if is_tested(framework, version):
            return Check("frameworks", framework, "ok", f"{text} (tested: {tested})", facts)
        return Check("frameworks", framework, "warn", f"{text}; tested: {tested}", facts)

    def _operations(self, framework: str) -> Check:
        library = self._libraries[framework]
        name = f"{framework} operations"
        if library:
            return Check("frameworks", name, "ok", str(library), {"library": str(library)})
        text = f"not built for this version; run 'python -m dl_comm.build {framework}', or wait a minute at first use"
        return Check("frameworks", name, "warn", text, {"library": None})
