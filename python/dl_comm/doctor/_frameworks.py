"""Checks the frameworks: installed, tested version, importable, operations built."""

from __future__ import annotations

from typing import Any

from dl_comm._libraries.build import existing_library
from dl_comm._libraries.frameworks import FRAMEWORKS, framework_version, is_installed
from dl_comm.doctor._checks import Check, Verdict
from dl_comm.doctor._probes import Failed, Probe
from dl_comm.doctor._tested import is_tested, tested_text

_BACKEND = "torch.distributed"


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
        self._backend = existing_library(_BACKEND) if "torch" in self._installed else None
        if imports and self._backend:
            self._probes[_BACKEND] = Probe("distributed")

    def check(self) -> list[Check]:
        """The checks."""
        checks = []
        for framework in FRAMEWORKS:
            if framework in self._installed:
                checks += [self._version(framework), self._operations(framework)]
                checks += [self._distributed()] if framework == "torch" else []
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
        return Check("frameworks", name, "warn", _not_built(framework), {"library": None})

    def _distributed(self) -> Check:
        """The backend for ``init_process_group``, which many scripts do not need."""
        facts: dict[str, Any] = {"library": self._backend and str(self._backend)}
        verdict: Verdict = "ok"
        text = str(self._backend or _not_built("torch"))
        if probe := self._probes.get(_BACKEND):
            try:
                facts |= probe.result()
            except Failed as error:
                facts["error"], verdict, text = str(error), "bad", str(error)
            else:
                if facts["all_reduce_is_right"]:
                    text = f"an all_reduce works; {text}"
                else:
                    verdict, text = "bad", "an all_reduce of one rank is wrong"
        return Check("frameworks", _BACKEND, verdict, f"backend dl_comm: {text}", facts)


def _not_built(framework: str) -> str:
    return f"not built for this version; run 'dl-comm build {framework}', or wait a minute at first use"
