"""The command line of the benchmark: its options, and which of them go together. Imports no framework."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Shape:
    """What a model sees of a data set: square images of `side` pixels with `channels`, and `classes` labels."""

    side: int
    channels: int
    classes: int


SHAPES = {"imagenet": Shape(224, 3, 1000), "cifar10": Shape(32, 3, 10), "mnist": Shape(28, 1, 10)}

# The data sets that a model takes, the one that it is usually trained on first.
MODELS = {
    "trivial": ("imagenet", "cifar10", "mnist"),
    "lenet": ("mnist", "cifar10"),
    "resnet20": ("cifar10",),
    "resnet56": ("cifar10",),
    "alexnet": ("imagenet",),
    "vgg16": ("imagenet",),
    "resnet50": ("imagenet",),
    "inception3": ("imagenet",),
}
SIDES = {"inception3": 299}  # where it is not the data set's

# Options that only some ways of updating variables know.
ONLY_FOR = {
    "nthread_per_team": ("dl_comm",),
    "nteams": ("dl_comm",),
    "ksteps": ("dl_comm",),
    "trans_alg": ("dl_comm",),
    "bucket_mb": ("dl_comm", "gloo"),
}


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Read the command line, `sys.argv` by default.

    Besides the options the result has `data` (the data set's name), `shape` (its Shape for the model) and `synthetic`
    (whether images are made up). Options that do not go together end the program with an error that says why.
    """
    parser = _parser()
    args = parser.parse_args(arguments)
    if args.framework == "tensorflow" and args.variable_update == "gloo":
        parser.error("--variable_update gloo is torch's DistributedDataParallel; --framework tensorflow has none")
    if args.framework == "tensorflow" and args.data_format == "NCHW":
        parser.error("--data_format NCHW: TensorFlow's convolutions on a CPU take NHWC only")
    if args.framework == "tensorflow" and args.bucket_mb is not None:
        parser.error("--bucket_mb: TensorFlow averages all gradients of a step in one call; there are no buckets")
    for option, ways in ONLY_FOR.items():
        if getattr(args, option) is not None and args.variable_update not in ways:
            parser.error(f"--{option} needs --variable_update {' or '.join(ways)}")
    if args.trans_alg is not None and args.ksteps is None:
        parser.error("--trans_alg needs --ksteps")
    args.synthetic = args.data_dir is None
    if args.data_name == "synthetic" and not args.synthetic:
        parser.error("--data_dir needs --data_name imagenet, cifar10 or mnist")
    args.data = MODELS[args.model][0] if args.data_name in (None, "synthetic") else args.data_name
    if args.data not in MODELS[args.model]:
        parser.error(f"--model {args.model} takes {' or '.join(MODELS[args.model])}, not --data_name {args.data}")
    shape = SHAPES[args.data]
    args.shape = Shape(SIDES.get(args.model, shape.side), shape.channels, shape.classes)
    if args.data_format is None:
        args.data_format = "NHWC" if args.framework == "tensorflow" else "NCHW"
    return args


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description="Train a convolutional network for some steps and say how fast it was")
    parser.add_argument("--framework", choices=("torch", "tensorflow"), default="torch")
    parser.add_argument("--model", choices=MODELS, default="trivial")
    parser.add_argument("--batch_size", type=_positive, default=32, help="images a step on each rank")
    parser.add_argument("--num_batches", type=_positive, default=100, help="steps that are measured")
    parser.add_argument("--num_warmup_batches", type=_whole, default=10, help="steps before them")
    parser.add_argument("--display_every", type=_positive, default=10, help="steps between two lines of output")
    parser.add_argument(
        "--data_name",
        choices=("synthetic", *SHAPES),
        help="the data set; by default the model's usual one. Its images are made up where there is no --data_dir",
    )
    parser.add_argument("--data_dir", help="where the data set lies; see README.md")
    parser.add_argument(
        "--variable_update",
        choices=("dl_comm", "none", "gloo"),
        default="dl_comm",
        help="who averages the gradients: dl_comm, nobody, or torch's DistributedDataParallel over gloo",
    )
    parser.add_argument("--optimizer", choices=("sgd", "momentum", "rmsprop", "adam"), default="sgd")
    parser.add_argument("--init_learning_rate", type=float, default=0.005)
    parser.add_argument("--data_format", choices=("NCHW", "NHWC"), help="order of an image's axes in memory")
    parser.add_argument(
        "--num_intra_threads", type=_positive, help="threads of an operation; by default cores over ranks of the host"
    )
    parser.add_argument(
        "--single_rank_images_per_sec",
        type=float,
        metavar="BASELINE",
        help="images/sec of one rank alone: prints how much of it each of several ranks reaches",
    )
    group = parser.add_argument_group("dl_comm")
    group.add_argument("--nthread_per_team", type=_positive, help="threads of a team (2)")
    group.add_argument("--nteams", type=_positive, help="teams (1)")
    group.add_argument("--bucket_mb", type=float, help="size of a bucket of gradients, torch and gloo too (25)")
    group.add_argument("--ksteps", type=int, help="config_team's ksteps; without it every step is blocking")
    group.add_argument("--trans_alg", type=int, choices=(0, 1), help="config_team's trans_alg (0)")
    return parser


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text} is not at least 1")
    return number


def _whole(text: str) -> int:
    number = int(text)
    if number < 0:
        raise argparse.ArgumentTypeError(f"{text} is negative")
    return number
