"""The scripts of the documentation run with the documented results; its tables and references are complete."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import dl_comm
import imported
from dl_comm import _dl_comm
from imported import python
from launch import launch, run

ROOT = Path(__file__).parents[2]


def scripts(page: str, section: str = "") -> tuple[str, str]:
    """The serial and the parallel script of a page, or of its section, which has their difference."""
    text = (ROOT / "docs" / page).read_text()
    if section:
        (text,) = re.findall(rf"^## {section}\n(.*?)(?=^## |\Z)", text, re.MULTILINE | re.DOTALL)
    (diff,) = re.findall(r"^```diff\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    serial, parallel = (
        "".join(f"{line[1:]}\n" for line in diff.splitlines() if not line.startswith(sign)) for sign in "+-"
    )
    return serial, parallel


@pytest.mark.parametrize(
    ("page", "section"),
    [
        ("porting.md", "NumPy"),
        pytest.param("torch.md", "", marks=pytest.mark.heavy),
        pytest.param("keras.md", "", marks=pytest.mark.heavy),
        pytest.param("tensorflow.md", "", marks=pytest.mark.heavy),
        pytest.param("porting.md", "TensorFlow 1", marks=pytest.mark.heavy),
    ],
)
def test_the_parallel_script_ends_where_the_serial_one_does(page: str, section: str, tmp_path: Path) -> None:
    serial, parallel = scripts(page, section)
    command = [sys.executable, "-m", "dl_comm.tf1"] if section == "TensorFlow 1" else [sys.executable]
    losses = []
    for name, text, ranks in (("serial", serial, 0), ("parallel", parallel, 1), ("parallel", parallel, 2)):
        path = tmp_path / f"{name}.py"
        path.write_text(text)
        env = {"OMP_NUM_THREADS": "1", "TF_CPP_MIN_LOG_LEVEL": "3"}
        finished = launch(ranks, [*command, str(path)], 200, env) if ranks else run([*command, str(path)], 200, env)
        assert finished.returncode == 0, finished.output
        losses += re.findall(r"^loss (\S+)$", finished.output, re.MULTILINE)
    assert len(losses) == 3
    assert [float(loss) for loss in losses] == pytest.approx([float(losses[0])] * 3, rel=2e-4)


def test_the_c_programs_end_with_the_same_weight(tmp_path: Path) -> None:
    serial, parallel = scripts("porting.md", "C")
    package = Path(dl_comm.__file__).parent
    weights = []
    for name, text, flags in (
        ("serial", serial, []),
        (
            "parallel",
            parallel,
            [f"-I{dl_comm.get_include()}", str(package / "libdl_comm.so.0"), f"-Wl,-rpath,{package}"],
        ),
    ):
        source, program = tmp_path / f"{name}.c", tmp_path / name
        source.write_text(text)
        subprocess.run(
            ["cc", "-Wall", "-Werror", str(source), "-o", str(program), *flags, "-Wl,--allow-shlib-undefined"],
            check=True,
        )
        finished = launch(2, [str(program)], 60) if flags else run([str(program)], 60)
        assert finished.returncode == 0, finished.output
        weights.append(finished.output.strip())
    assert weights[0] == weights[1]
    assert weights[0].startswith("weight 31.1")


def test_the_manual_page_has_every_function_as_the_header_has_it() -> None:
    header = (ROOT / "core/include/dl_comm.h").read_text()
    page = (ROOT / "docs/man/dl_comm.3").read_text()
    prototypes = re.findall(r"^((?:const )?\w+\*?) (dl_\w+)\(([^;]*)\);", header, re.MULTILINE)
    assert len(prototypes) > 20
    declared = [(kind, name, re.sub(r"\s+", " ", arguments).split(", ")) for kind, name, arguments in prototypes]
    lines = re.findall(r'^\.Ft "?([^"\n]+)"?\n\.Fn (\w+) (.*)$', page, re.MULTILINE)
    assert [(kind, name, re.findall(r'"([^"]*)"', arguments)) for kind, name, arguments in lines] == declared
    errors = re.findall(r"#define (DL_COMM_ERROR_\w+)", header)
    assert re.findall(r"^\.It Dv (DL_COMM_ERROR_\w+)", page, re.MULTILINE) == errors


def test_the_example_of_the_manual_page_compiles(tmp_path: Path) -> None:
    page = (ROOT / "docs/man/dl_comm.3").read_text()
    (text,) = re.findall(r"^\.Bd -literal\n(.*?)^\.Ed", page, re.MULTILINE | re.DOTALL)
    source = tmp_path / "example.c"
    source.write_text(text.replace("\\e", "\\"))
    subprocess.run(
        ["cc", "-Wall", "-Werror", "-fsyntax-only", f"-I{dl_comm.get_include()}", str(source)], check=True, timeout=60
    )


def test_every_variable_is_in_the_table() -> None:
    """The core has the list of variables; those of the build and the tests are internal."""
    known = json.loads(_dl_comm.describe())["variables"]
    table = re.findall(r"^\| `(DL_COMM_[A-Z_]+)` \|", (ROOT / "docs/environment.md").read_text(), re.MULTILINE)
    assert sorted(table) == sorted(known)
    files = [ROOT / "core/src/config.rs", ROOT / "core/src/helper.rs", *(ROOT / "python/dl_comm").rglob("*.py")]
    used = {name for file in files for name in re.findall(r'"(DL_COMM_[A-Z_]+)"', file.read_text())}
    assert used - set(known) == {name for name in used if name.startswith(("DL_COMM_LIB", "DL_COMM_MPI"))}
    assert set(known) - used == {"DL_COMM_VENV"}, "unused variables"


@pytest.mark.heavy
def test_the_function_of_the_page_runs_on_ranks(tmp_path: Path) -> None:
    (script,) = re.findall(r"^```python\n(.*?)^```$", (ROOT / "docs/run.md").read_text(), re.MULTILINE | re.DOTALL)
    (tmp_path / "script.py").write_text(script)
    finished = run([sys.executable, str(tmp_path / "script.py")], 200, {"OMP_NUM_THREADS": "1"})
    assert finished.output == "2 True\n", finished.output


README = (ROOT / "README.md").read_text()
# What a script has before and after README's snippet; it prints "<same>" if all ranks end with the same parameters.
DDP = (
    """
import os, torch
torch.manual_seed(int(os.environ.get("PMI_RANK", 0)))
""",
    """
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 1))
model(torch.randn(8, 4)).sum().backward()
flat = torch.cat([parameter.grad.flatten() for parameter in model.parameters()])
everyone = [torch.empty_like(flat) for _ in range(torch.distributed.get_world_size())]
torch.distributed.all_gather(everyone, flat)
print("<same>" if all(torch.equal(flat, other) for other in everyone) else "<different>")
torch.distributed.destroy_process_group()
""",
)
TORCH = (
    """
import torch
inputs, model = torch.randn(64, 4), torch.nn.Linear(4, 1)
targets = inputs.sum(1, keepdim=True)
""",
    """
for _ in range(3):
    optimizer.zero_grad()
    torch.nn.functional.mse_loss(model(inputs), targets).backward()
    optimizer.step()
print("<same>" if dl_comm.check_buffers_match([p.detach() for p in model.parameters()], 1) == 0 else "<different>")
""",
)
INDEX = (
    """
import torch
from torch.utils.data import DataLoader, TensorDataset
inputs, model, criterion = torch.linspace(-1, 1, 101)[:, None], torch.nn.Linear(1, 1), torch.nn.MSELoss()
dataset, optimizer = TensorDataset(inputs, 3 * inputs), torch.optim.SGD(model.parameters(), lr=0.1)
""",
    TORCH[1].partition("optimizer.step()")[2],
)
KERAS = (
    """
import keras, numpy as np
inputs = np.random.default_rng().normal(size=(64, 4))
targets = inputs.sum(axis=1, keepdims=True)
model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
""",
    """
print("<same>" if dl_comm.check_buffers_match(model.get_weights(), 1) == 0 else "<different>")
""",
)
TENSORFLOW = (
    """
import tensorflow as tf
inputs, variables = tf.random.normal((64, 4)), [tf.Variable(tf.random.normal((4, 1)))]
targets = tf.reduce_sum(inputs, axis=1, keepdims=True)
with tf.GradientTape() as tape:
    loss = tf.reduce_mean((inputs @ variables[0] - targets) ** 2)
""",
    """
variables[0].assign_sub(0.1 * gradients[0])
print("<same>" if dl_comm.check_buffers_match(variables, 1) == 0 else "<different>")
""",
)


@pytest.mark.parametrize("ranks", [pytest.param(1, marks=pytest.mark.heavy), 2])
@pytest.mark.parametrize(
    ("number", "around"),
    [(0, DDP), (1, TORCH), (2, KERAS), (3, TENSORFLOW), (4, INDEX)],
    ids=["ddp", "torch", "keras", "tensorflow", "index"],
)
def test_the_changes_of_readme_run(number: int, around: tuple[str, str], ranks: int, tmp_path: Path) -> None:
    """And those of the first page. All ranks start with different parameters and end with the same."""
    texts = README + (ROOT / "docs/index.md").read_text()
    snippets = re.findall(r"^```python\n(.*?)^```$", texts, re.MULTILINE | re.DOTALL)
    assert len(snippets) == 5
    path = tmp_path / "script.py"
    path.write_text(around[0] + snippets[number] + around[1])
    # That of torch.distributed is started as a user starts it.
    imports = ("tensorflow",) if around in (KERAS, TENSORFLOW) else imported.TORCH
    python_with = [sys.executable] if around is DDP else python(*imports)
    env = {"OMP_NUM_THREADS": "1", "TF_CPP_MIN_LOG_LEVEL": "3"}
    finished = launch(ranks, [*python_with, str(path)], 200, env)
    assert finished.returncode == 0, finished.output
    assert re.findall(r"<(\w+)>", finished.output) == ["same"] * ranks, finished.output


def test_readme_is_short_and_its_commands_exist() -> None:
    assert len(README.splitlines()) <= 100
    commands = re.findall(r"^    (\S+\.sh)\b", README, re.MULTILINE)
    assert commands == ["examples/run.sh", "tests/run.sh"]
    assert all((ROOT / command).exists() for command in commands)


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub and the site make them."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("name", ["README.md", "CONTRIBUTING.md", "SECURITY.md", "CHANGELOG.md"])
def test_links_lead_somewhere(name: str) -> None:
    text = (ROOT / name).read_text()
    links = re.findall(r'\]\(([^)]+)\)|(?:src|srcset)="([^"]+)"', text)
    for link in (one or other for one, other in links):
        if link.startswith("https://"):
            continue
        path, _, anchor = link.partition("#")
        assert (ROOT / path).exists(), link
        assert not anchor or anchor in anchors(ROOT / path), link


def test_the_kept_variables_are_documented() -> None:
    """tests/run.sh keeps some variables of the shell; CONTRIBUTING.md names them."""
    (kept,) = re.findall(r"for name in (.*?); do", (ROOT / "tests/run.sh").read_text(), re.DOTALL)
    (listed,) = re.findall(r"keeps only these variables(.*?)\n\n", (ROOT / "CONTRIBUTING.md").read_text(), re.DOTALL)
    names = set(re.findall(r"\b[A-Za-z_]{2,}\b", kept))
    assert names == set(re.findall(r"`([A-Za-z_]+)`", listed))


def test_the_site_builds(tmp_path: Path) -> None:
    """Without a warning: all links and anchors exist, every page is in the menu, all docstrings can be read."""
    if not os.environ.get("DL_COMM_TEST_EVERYTHING"):
        pytest.importorskip("mkdocs")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "-f", str(ROOT / "mkdocs.yml")]
    command += ["--site-dir", str(tmp_path / "site")]
    finished = run(command, 200, {"NO_MKDOCS_2_WARNING": "1"})
    assert finished.returncode == 0, finished.output
    for page in (ROOT / "docs/api").glob("*.md"):
        module, *listed = re.findall(r"^::: (\S+)$", page.read_text(), re.MULTILINE)
        text = (tmp_path / "site/api" / page.stem / "index.html").read_text()
        # A name without a docstring would not appear.
        assert set(re.findall(rf'id="({re.escape(module)}\.\w+)"', text)) == set(listed), page.name


def texts_of_the_source() -> str:
    """All string literals of the product, joined where a line ends within one."""
    files = [*(ROOT / "core/src").rglob("*.rs"), *(ROOT / "python/dl_comm").rglob("*.py")]
    text = "\n".join(file.read_text() for file in files)
    text = re.sub(r"\\\n\s*", "", text)
    return re.sub(r'"\n\s*(?:\+ \(\n\s*)?f?"', "", text)


def test_each_message_of_the_troubleshooting_page_exists() -> None:
    page = (ROOT / "docs/troubleshooting.md").read_text()
    _, messages = page.split("\n## Messages\n")
    headings = re.findall(r"^### `(.*)`$", messages, re.MULTILINE)
    assert len(headings) == messages.count("\n### ") > 15
    source = texts_of_the_source()
    for heading in headings:
        # `{}` and `{name:.1}` in the source are `...` in the heading.
        pattern = r".{0,80}?".join(re.escape(part) for part in re.split(r"\.\.\.", heading.strip(". ")))
        assert re.search(pattern, source), f"no message {heading!r}"
