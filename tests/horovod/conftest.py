"""For the tests of the drop-in `horovod`.

`ranks/` and `ranks_tensorflow/` run on the ranks of a job, each by itself:
`python tests/launch.py N SECONDS python -m pytest tests/horovod/ranks`; `programs/` starts its own.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("DL_COMM_TIMEOUT_S", "100")
os.environ.setdefault("DL_COMM_DUMP_DIR", "none")

PACKAGE = Path(__file__).parents[2] / "python" / "horovod"
sys.path.insert(0, str(PACKAGE))
