"""Groups of some ranks by the C interface: between hosts, with a lost rank. tests/rust/c_api.rs has the other cases."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

import dl_comm
from hosts import Hosts, possible
from launch import ending_together, launch

SOURCE = Path(__file__).parent.parent / "c" / "groups.c"


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> str:
    program, package = tmp_path_factory.mktemp("groups") / "groups", Path(dl_comm.__file__).parent
    links = [f"-L{package}", "-l:libdl_comm.so.0", f"-Wl,-rpath,{package},--allow-shlib-undefined", "-pthread"]
    command = ["cc", f"-I{dl_comm.get_include()}", str(SOURCE), "-o", str(program), *links]
    subprocess.run(command, check=True, timeout=60)
    return str(program)


@pytest.fixture(scope="module")
def hosts() -> Iterator[Hosts]:
    if not possible():
        pytest.skip("needs root and iproute2 to make network namespaces")
    with Hosts(2) as hosts:
        yield hosts


@pytest.mark.heavy
@pytest.mark.parametrize("per_host", [1, 2])
def test_groups_between_hosts(program: str, hosts: Hosts, per_host: int) -> None:
    finished = hosts.launch(per_host, [program], 200)
    assert finished.returncode == 0, finished.output


@pytest.mark.parametrize("two_hosts", [False, True])
def test_a_lost_rank_ends_its_groups_only(
    program: str, two_hosts: bool, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    command = ending_together([program, "lost"], tmp_path, 4)
    finished = request.getfixturevalue("hosts").launch(2, command, 200) if two_hosts else launch(4, command, 200)
    assert not finished.timed_out, finished.output
    going_on = sorted(re.findall(r"rank (\d) goes on", finished.output))
    assert going_on == ["0", "1", "2"], finished.output
