"""Starts jobs: ``horovodrun`` (`horovod.runner.launch`) and ``horovod.run``.

Imports neither a framework nor dl_comm's core.
"""

from horovod.runner._run import run

__all__ = ["run"]
