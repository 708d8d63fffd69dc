"""The command ``dl-comm`` and its verbs: help, errors, exit statuses, and what they load."""

from __future__ import annotations

import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

COMMAND = str(Path(sys.executable).with_name("dl-comm"))
VERBS = ("run", "env", "doctor", "timeline", "dumps", "build", "tf1")
LOADING = ("doctor", "timeline", "build")
OLD = {verb: verb for verb in VERBS if verb not in ("env", "dumps")} | {"dumps": "analyze_dumps"}


def start(*command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def in_process(text: str) -> subprocess.CompletedProcess[str]:
    """Runs text in which ``command(...)`` is the program: an interpreter for several calls saves processor time."""
    before = (
        "import sys\nfrom dl_comm.__main__ import main\n"
        "def command(*arguments):\n"
        "    print('>', *arguments, flush=True)\n"
        "    try: status = main(arguments)\n"
        "    except SystemExit as end: status = end.code or 0\n"
        "    sys.stdout.flush()\n"
        "    print('<', status, 'dl_comm._dl_comm' in sys.modules, flush=True)\n"
    )
    return subprocess.run(
        [sys.executable, "-c", before + text],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=60,
        check=False,
    )


def test_the_verbs_are_listed() -> None:
    alone, asked = start(COMMAND), start(sys.executable, "-m", "dl_comm", "--help")
    assert alone.returncode == asked.returncode == 0, asked.stderr
    assert alone.stdout == asked.stdout
    listed = [line.split()[0] for line in alone.stdout.partition("verbs:\n")[2].splitlines() if line.startswith("  ")]
    assert tuple(listed) == VERBS
    assert max(map(len, alone.stdout.splitlines())) <= 100
    done = start(COMMAND, "--version")
    assert done.stdout.startswith(f"dl_comm {version('dl_comm')}, built for ")


def test_an_unknown_verb_is_refused_with_the_list() -> None:
    done = in_process("command('doctr')\ncommand('doctr', '--json')\ncommand('--what')")
    first, second, third = (part for part in done.stdout.split("> ") if part)
    for part in (first, second):
        assert f"unknown verb 'doctr' (expected one of {', '.join(VERBS)})" in part
        assert part.endswith("< 2 False\n")
    assert "unrecognized arguments: --what" in third
    assert third.endswith("< 2 False\n")


def test_each_verb_has_its_help_and_its_errors() -> None:
    lines = [f"command({verb!r}, '--help')" for verb in VERBS]
    lines += ["command('run', '-n', '0', 'p')", "command('env')", "command('dumps', '/nowhere')"]
    lines += ["command('build', 'caffe')", "command('tf1', 'no_such_script.py')", "command('timeline')"]
    # Last those that load the core, as in the older spelling.
    lines.sort(key=lambda line: any(verb in line for verb in LOADING))
    done = in_process("\n".join(lines))
    parts = dict(part.split("\n", 1) for part in done.stdout.split("> ") if part)
    for verb in VERBS:
        text = parts[f"{verb} --help"]
        assert text.startswith(f"usage: {'mpiexec -n 2 ' if verb == 'env' else ''}dl-comm {verb} "), text
        assert "python -m" not in text.splitlines()[0]
        assert text.endswith(f"< 0 {verb in LOADING}\n"), text
    assert "-n 0: must be at least 1" in parts["run -n 0 p"]
    assert "usage: mpiexec -n 2 dl-comm env PROGRAM" in parts["env"]
    assert "dl-comm dumps: " in parts["dumps /nowhere"]
    assert "unknown framework caffe" in parts["build caffe"]
    assert "no_such_script.py does not exist" in parts["tf1 no_such_script.py"]
    assert "dl-comm timeline: error: " in parts["timeline"]
    ends = [text.splitlines()[-1] for name, text in parts.items() if "--help" not in name]
    assert [end.split()[1] for end in ends] == ["2"] * 6


@pytest.mark.parametrize("verb", OLD)
def test_the_older_spellings_stay(verb: str) -> None:
    done = start(sys.executable, "-m", f"dl_comm.{OLD[verb]}", "--help")
    name = "dl-comm-run" if verb == "run" else f"python -m dl_comm.{OLD[verb]}"
    assert done.stdout.startswith(f"usage: {name} "), done.stdout + done.stderr
    assert done.returncode == 0


def test_run_starts_ranks_and_returns_their_status(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("import os, sys\nrank = int(os.environ['RANK'])\nprint('hello from', rank)\nsys.exit(rank * 3)\n")
    done = start(COMMAND, "run", "-n", "2", "--all-output", str(script))
    assert sorted(done.stdout.split("\n")) == ["", "hello from 0", "hello from 1"]
    assert done.returncode == 3, done.stderr


def test_a_script_that_fails_under_tf1_has_its_own_traceback(tmp_path: Path) -> None:
    """As with the older spelling, without the frames of the command. ``tensorflow`` is empty: its import is slow."""
    (tmp_path / "script.py").write_text("import sys\nprint(sys.argv, sys.path[0])\nraise KeyError('v')\n")
    text = (
        "import sys, dl_comm.tf1\ndl_comm.tf1.install = lambda: None\n"
        f"sys.argv = {['dl-comm', 'tf1', str(tmp_path / 'script.py'), '-x']!r}\n"
        "from dl_comm.__main__ import main\nsys.exit(main())\n"
    )
    (tmp_path / "dl-comm").write_text(text)
    done = start(sys.executable, str(tmp_path / "dl-comm"))
    assert done.stdout == f"{[str(tmp_path / 'script.py'), '-x']} {tmp_path}\n"
    assert done.returncode == 1
    frames = [line for line in done.stderr.splitlines() if line.startswith("  File ")]
    assert len(frames) == 1, done.stderr
    assert "script.py" in frames[0]
    assert done.stderr.rstrip().endswith("KeyError: 'v'")
