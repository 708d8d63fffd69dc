"""How much memory of freed results is kept."""

from __future__ import annotations

import sys

from launch import QUIET, run

PROGRAM = """
import os
import numpy as np
import dl_comm

def resident_bytes():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGESIZE")

dl_comm.init()
given = np.ones(8 << 20, np.float32)
dl_comm.gradients([given], 0)
before = resident_bytes()
for extra in range(12):
    # Each length is new, so no memory fits.
    dl_comm.gradients([given[extra << 12 :]], 0)
print("results kept:", (resident_bytes() - before) / given.nbytes)
dl_comm.finalize()
"""


def test_memory_of_freed_results_is_bounded() -> None:
    """As much as results have had at once: two, while the name is bound anew."""
    finished = run([sys.executable, "-c", PROGRAM], 60, QUIET)
    assert finished.returncode == 0, finished.output
    assert float(finished.output.split("results kept:")[1]) < 3, finished.output


def test_shared_memory_needs_started_ranks() -> None:
    program = """
import numpy as np
import dl_comm

def enter():
    try:
        with dl_comm.shared_memory():
            print("not refused")
    except dl_comm.StateError as error:
        print("refused:", error)

enter()
dl_comm.init()
with dl_comm.shared_memory():
    array = np.ones(100_000)
dl_comm.finalize()
enter()
# The memory outlives the ranks.
array += 1
assert (array == 2).all()
del array
"""
    finished = run([sys.executable, "-c", program], 60, QUIET)
    assert finished.returncode == 0, finished.output
    assert finished.output.count("refused: shared_memory() needs the ranks") == 2, finished.output
