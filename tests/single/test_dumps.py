"""Dumps of real jobs: when they are written, also by a rank that has not heard of what happened."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

from launch import Finished

Script = Callable[..., Finished]


def test_a_rank_that_has_not_noticed_a_failure_can_write_a_dump(script: Script, tmp_path: Path) -> None:
    finished = script(
        2,
        "import os, sys, time\nimport numpy as np\nimport dl_comm as mc\n"
        "mc.init()\n"
        f"folder, done = {str(tmp_path / 'dumps')!r}, {str(tmp_path / 'done')!r}\n"
        "if mc.get_rank() == 1:\n"
        "    try: mc.gradients([np.ones(3, np.float32)], timeout=0.5)\n"
        "    except mc.TimeoutError as error: open(done, 'w').write(str(error))\n"
        "else:\n"
        "    while not os.path.exists(done): time.sleep(0.02)\n"
        "mc.dump(folder)\n"
        "print('written', flush=True)\n"
        # The launcher may end the other rank when one has ended without MPI's leave.
        "open(f'{done}{mc.get_rank()}', 'w').close()\n"
        "while not all(os.path.exists(f'{done}{rank}') for rank in (0, 1)): time.sleep(0.02)\n",
        env={"DL_COMM_DUMP_DIR": str(tmp_path / "alarms")},
    )
    assert finished.output.count("written") == 2, finished.output
    for rank in range(2):
        (team,) = (t for t in json.loads((tmp_path / f"dumps/rank{rank}.json").read_text())["teams"] if t["team"] == 0)
        assert "was not complete after 0.5 s" in team["failure"]
