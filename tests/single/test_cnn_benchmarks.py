"""examples/cnn_benchmarks: its output, its options, its networks and its data."""

from __future__ import annotations

import argparse
import importlib
import itertools
import pickle
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from imported import TORCH, python
from launch import Finished, launch

FOLDER = Path(__file__).resolve().parents[2] / "examples" / "cnn_benchmarks"
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "TF_CPP_MIN_LOG_LEVEL": "3"}


def heavy(*values: str) -> Any:
    return pytest.param(*values, marks=pytest.mark.heavy)


def benchmark(ranks: int, *arguments: str) -> Finished:
    modules = ("tensorflow",) if "tensorflow" in arguments else TORCH
    return launch(ranks, [*python(*modules), str(FOLDER / "benchmark.py"), *arguments], timeout=180, env=ENVIRONMENT)


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Any]:
    """Import a module of the benchmark."""
    monkeypatch.syspath_prepend(str(FOLDER.parent))
    monkeypatch.syspath_prepend(str(FOLDER))
    return importlib.import_module


@pytest.mark.parametrize(
    ("framework", "arguments", "parameters"),
    [
        ("torch", "--model trivial --data_name cifar10 --bucket_mb 0.05 --optimizer momentum", "52,235"),
        heavy("torch", "--model resnet20 --data_format NHWC --nteams 2 --nthread_per_team 1", "269,722"),
        heavy("torch", "--model lenet --variable_update gloo --optimizer rmsprop --data_name cifar10", "62,006"),
        heavy("torch", "--model lenet --variable_update none", "61,706"),
        ("tensorflow", "--model trivial --data_name mnist --optimizer adam", "49,947"),
        heavy("tensorflow", "--model resnet20 --optimizer rmsprop", "269,722"),
        heavy("tensorflow", "--model lenet --variable_update none --num_intra_threads 1", "61,706"),
    ],
)
def test_output(framework: str, arguments: str, parameters: str) -> None:
    pytest.importorskip(framework)
    short = "--batch_size 4 --num_batches 5 --num_warmup_batches 1 --display_every 2 --single_rank_images_per_sec 10"
    result = benchmark(2, "--framework", framework, *arguments.split(), *short.split())
    assert result.returncode == 0, result.output
    lines = [line for line in result.output.splitlines() if not re.match(r"WARNING|[IW]\d{4} ", line)]
    fields = dict(re.findall(r"^(\w[\w ]*): +(.*)$", "\n".join(lines[: lines.index("==========")]), re.MULTILINE))
    assert fields["Parameters"] == parameters
    assert fields["Framework"] == framework
    assert fields["Dataset"].endswith(" (synthetic)")
    assert fields["Batch size"] == "8 global"
    assert fields["Num ranks"].startswith("2 on ")
    assert f"{'':13}4 per device" in lines
    body = lines[lines.index("==========") + 1 :]
    assert body[:3] == ["Running warm up", "Done warm up", "Step\tImg/sec\ttotal_loss"]
    number = r"(\d+\.\d)"
    for step, line in zip((1, 2, 4), body[3:6], strict=True):
        found = re.fullmatch(rf"{step}\timages/sec: {number} \+/- {number} \(jitter = {number}\)\t\d+\.\d{{3}}", line)
        assert found, line
        assert float(found.group(1)) > 0
    assert body[6] == body[8] == "-" * 64
    total = re.fullmatch(r"total images/sec: (\d+\.\d\d)", body[7])
    efficiency = re.fullmatch(r"scaling efficiency: (\d+\.\d) %", body[9])
    assert total, body
    assert efficiency, body
    assert float(efficiency.group(1)) == pytest.approx(float(total.group(1)) / 20 * 100, abs=0.1)
    assert len(body) == 10


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--framework tensorflow --variable_update gloo", "torch's DistributedDataParallel"),
        ("--framework tensorflow --data_format NCHW", "NHWC only"),
        ("--framework tensorflow --bucket_mb 1", "no buckets"),
        ("--variable_update none --bucket_mb 1", "--bucket_mb needs --variable_update dl_comm or gloo"),
        ("--variable_update gloo --ksteps 3", "--ksteps needs --variable_update dl_comm"),
        ("--variable_update none --nteams 3", "--nteams needs --variable_update dl_comm"),
        ("--trans_alg 1", "needs --ksteps"),
        ("--data_name synthetic --data_dir /data", "--data_dir needs"),
        ("--model resnet50 --data_name mnist", "--model resnet50 takes imagenet, not --data_name mnist"),
        ("--batch_size 0", "not at least 1"),
        ("--model resnet51", "invalid choice"),
    ],
)
def test_incompatible_options(
    arguments: str, message: str, module: Callable[[str], Any], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        module("options").parse(arguments.split())
    assert caught.value.code == 2
    assert message in capsys.readouterr().err


COUNT = """
import sys
sys.path.insert(0, sys.argv[1])
import options

def shape(name):
    usual = options.SHAPES[options.MODELS[name][0]]
    return options.Shape(options.SIDES.get(name, usual.side), usual.channels, usual.classes)

if sys.argv[2] == "torch":
    import torch, torch_models
    for name in options.MODELS:
        seen = shape(name)
        with torch.device("meta"):
            net = torch_models.build(name, seen)
            logits = net(torch.empty(2, seen.channels, seen.side, seen.side))
        assert logits.shape == (2, seen.classes), logits.shape
        print(name, sum(parameter.numel() for parameter in net.parameters()))
else:
    import tf_models
    for name in options.MODELS:
        net = tf_models.build(name, shape(name))
        assert net.output_shape == (None, shape(name).classes), net.output_shape
        print(name, net.count_params())
"""

SAME = {"trivial": 4_255_721, "lenet": 61_706, "alexnet": 61_100_840, "vgg16": 138_357_544}
# Keras also counts the moving averages of normalisations.
PARAMETERS = {
    "torch": {**SAME, "resnet20": 269_722, "resnet56": 853_018, "resnet50": 25_557_032, "inception3": 23_834_568},
    "tensorflow": {**SAME, "resnet20": 271_098, "resnet56": 857_082, "resnet50": 25_636_712, "inception3": 23_851_784},
}


@pytest.mark.heavy
@pytest.mark.parametrize("framework", ["torch", "tensorflow"])
def test_parameters_of_the_networks(framework: str) -> None:
    pytest.importorskip(framework)
    result = launch(1, [sys.executable, "-c", COUNT, str(FOLDER), framework], timeout=120, env=ENVIRONMENT)
    assert result.returncode == 0, result.output
    counts = re.findall(r"^(\w+) (\d+)$", result.output, re.MULTILINE)
    assert {name: int(count) for name, count in counts} == PARAMETERS[framework]


def options(module: Callable[[str], Any], *arguments: str) -> argparse.Namespace:
    return module("options").parse(arguments)


def test_synthetic_images(module: Callable[[str], Any]) -> None:
    args = options(module, "--model", "inception3", "--batch_size", "2")
    firsts = [next(module("data").batches(args, rank, 2, None)) for rank in range(2)]
    for images, labels in firsts:
        assert images.shape == (2, 299, 299, 3)
        assert images.dtype == np.float32
        assert labels.shape == (2,)
        assert labels.max() < 1000
    assert not np.array_equal(firsts[0][0], firsts[1][0])


@pytest.mark.parametrize("kind", ["binary", "python"])
def test_cifar10_files(kind: str, tmp_path: Path, module: Callable[[str], Any]) -> None:
    labels = np.arange(20, dtype=np.uint8) % 10
    pixels = np.zeros((20, 3, 32, 32), np.uint8)
    pixels[:, 0] = np.arange(20).reshape(20, 1, 1)  # red has the image's index
    pixels[:, 2, 31] = 255  # the last row is blue
    for part in range(2):
        mine = slice(10 * part, 10 * part + 10)
        rows = pixels[mine].reshape(10, -1)
        if kind == "binary":
            np.concatenate([labels[mine, None], rows], 1).tofile(tmp_path / f"data_batch_{part + 1}.bin")
        else:
            folder = tmp_path / "cifar-10-batches-py"
            folder.mkdir(exist_ok=True)
            batch = {b"data": rows, b"labels": labels[mine].tolist()}
            (folder / f"data_batch_{part + 1}").write_bytes(pickle.dumps(batch))
    args = options(
        module, "--model", "lenet", "--data_name", "cifar10", "--data_dir", str(tmp_path), "--batch_size", "5"
    )
    seen: list[int] = []
    for rank in range(2):
        for images, classes in itertools.islice(module("data").batches(args, rank, 2, None), 2):
            assert images.shape == (5, 32, 32, 3)
            assert (images[:, 31, :, 2] == 1).all()
            assert (images[:, 30, :, 2] == -1).all()
            numbers = np.rint((images[:, 0, 0, 0] + 1) * 127.5).astype(int)
            assert (classes == numbers % 10).all()
            seen += numbers.tolist()
    assert sorted(seen) == list(range(20)), "an epoch has each image once"
    with pytest.raises(ValueError, match="too few"):
        next(module("data").batches(args, 0, 5, None))
    args.data_dir = str(tmp_path / "nowhere")
    with pytest.raises(FileNotFoundError, match="no data_batch_1"):
        module("data").batches(args, 0, 1, None)


def test_imagenet_files(tmp_path: Path, module: Callable[[str], Any]) -> None:
    for name in ("b/3.JPEG", "a/1.jpg", "a/2.jpeg", "b/4.JPG", "b/notes.txt"):
        path = tmp_path / "train" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()

    def decode(path: Path, side: int) -> np.ndarray:
        return np.full((side, side, 3), int(path.stem), np.uint8)

    args = options(module, "--data_name", "imagenet", "--data_dir", str(tmp_path), "--batch_size", "1")
    seen = {}
    for rank in range(2):
        for images, labels in itertools.islice(module("data").batches(args, rank, 2, decode), 2):
            assert images.shape == (1, 224, 224, 3)
            seen[round((float(images[0, 0, 0, 0]) + 1) * 127.5)] = int(labels[0])
    assert seen == {1: 0, 2: 0, 3: 1, 4: 1}
    args.data_dir = str(tmp_path / "train" / "a")
    with pytest.raises(FileNotFoundError, match="no folders of JPEG files"):
        next(module("data").batches(args, 0, 1, decode))


JPEGS = """
import sys
import tensorflow as tf
for label in "ab":
    for number in range(4):
        image = tf.cast(tf.random.uniform((40 + number, 60, 3), 0, 256, tf.int32), tf.uint8)
        tf.io.write_file(f"{sys.argv[1]}/{label}/{number}.JPEG", tf.io.encode_jpeg(image))
"""


@pytest.mark.heavy
def test_training_on_jpeg_files(tmp_path: Path) -> None:
    pytest.importorskip("tensorflow")
    made = launch(1, [sys.executable, "-c", JPEGS, str(tmp_path)], timeout=100, env=ENVIRONMENT)
    assert made.returncode == 0, made.output
    short = "--batch_size 2 --num_batches 3 --num_warmup_batches 0"
    data = ("--data_name", "imagenet", "--data_dir", str(tmp_path))
    result = benchmark(2, "--framework", "tensorflow", *data, *short.split())
    assert result.returncode == 0, result.output
    assert re.search(r"^Dataset: +imagenet$", result.output, re.MULTILINE)
    assert re.search(r"^total images/sec: \d", result.output, re.MULTILINE)


@pytest.mark.heavy
def test_training_on_mnist_files(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    for stem in ("train", "t10k"):
        images = np.arange(64 * 784, dtype=np.uint32).astype(np.uint8)
        header = np.array([0x803, 64, 28, 28], ">i4").tobytes()
        (tmp_path / f"{stem}-images-idx3-ubyte").write_bytes(header + images.tobytes())
        labels = np.arange(64, dtype=np.uint8) % 10
        header = np.array([0x801, 64], ">i4").tobytes()
        (tmp_path / f"{stem}-labels-idx1-ubyte").write_bytes(header + labels.tobytes())
    short = "--batch_size 8 --num_batches 10 --num_warmup_batches 0"
    result = benchmark(2, "--model", "lenet", "--data_name", "mnist", "--data_dir", str(tmp_path), *short.split())
    assert result.returncode == 0, result.output
    assert re.search(r"^Dataset: +mnist$", result.output, re.MULTILINE)
    result = benchmark(1, "--model", "lenet", "--data_dir", str(tmp_path / "nowhere"))
    assert result.returncode != 0
    assert "no train-images" in result.output


PATCHED = """
import sys
sys.path.insert(0, sys.argv.pop(1))
import benchmark, torch, torch_side
import dl_comm as mc

{patch}
sys.exit(benchmark.main())
"""


def patched(patch: str, *arguments: str) -> Finished:
    script = PATCHED.format(patch=patch)
    return launch(2, [sys.executable, "-c", script, str(FOLDER), *arguments], timeout=120, env=ENVIRONMENT)


SHORT = ("--model", "lenet", "--batch_size", "2", "--num_batches", "3", "--num_warmup_batches", "2")


@pytest.mark.heavy
def test_different_weights_are_reported() -> None:
    pytest.importorskip("torch")
    result = patched("torch_side.Trainer.weights = lambda trainer: [torch.tensor([mc.get_rank()])]", *SHORT)
    assert result.returncode != 0
    assert "the ranks' weights differ" in result.output


@pytest.mark.heavy
def test_options_of_config_team() -> None:
    pytest.importorskip("torch")
    # In one write: the ranks share the output.
    patch = "mc.config_team = lambda *arguments: __import__('os').write(1, f'configured {arguments}\\n'.encode())"
    result = patched(patch, *SHORT, "--ksteps", "-2", "--trans_alg", "1")
    assert result.returncode == 0, result.output
    assert result.output.count("configured (0, 1, -2, 5, 1, 10)") == 2
    assert "configured" not in patched(patch, *SHORT).output
