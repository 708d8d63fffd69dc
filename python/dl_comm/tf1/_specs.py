"""What an Estimator is told: modes, configuration, and the specs of models, training and evaluation.

Thread rule: these are values.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import tensorflow

tf = tensorflow.compat.v1

_DEFAULT_SECONDS = 600


class ModeKeys:
    """What a model function is called for."""

    TRAIN = "train"
    EVAL = "eval"
    PREDICT = "infer"


@dataclasses.dataclass(frozen=True)
class RunConfig:
    """How an Estimator runs.

    Attributes:
        model_dir: The folder of checkpoints and summaries.
        tf_random_seed: The seed of the graphs.
        save_summary_steps: Steps between summaries; None or 0 for none.
        save_checkpoints_steps: Steps between checkpoints. Without it there is one every 600 seconds.
        save_checkpoints_secs: Seconds between checkpoints. None for both: no checkpoints.
        session_config: A `tf.ConfigProto`; None is one with soft placement.
        keep_checkpoint_max: How many checkpoints are kept; None or 0 for all.
        keep_checkpoint_every_n_hours: Checkpoints that are kept beyond that.
        log_step_count_steps: Steps between lines about loss and speed, which TensorFlow logs as INFO.

    Raises:
        ValueError: Both `save_checkpoints_steps` and `save_checkpoints_secs` are given.
    """

    model_dir: str | None = None
    tf_random_seed: int | None = None
    save_summary_steps: int | None = 100
    save_checkpoints_steps: int | None = -1
    save_checkpoints_secs: float | None = -1
    session_config: Any = None
    keep_checkpoint_max: int | None = 5
    keep_checkpoint_every_n_hours: float = 10000
    log_step_count_steps: int | None = 100

    def __post_init__(self) -> None:
        steps, seconds = self.save_checkpoints_steps, self.save_checkpoints_secs
        if steps == -1:
            steps = None
            seconds = _DEFAULT_SECONDS if seconds == -1 else seconds
        elif seconds == -1:
            seconds = None
        if steps is not None and seconds is not None:
            raise ValueError("RunConfig takes save_checkpoints_steps or save_checkpoints_secs, not both")
        object.__setattr__(self, "save_checkpoints_steps", steps)
        object.__setattr__(self, "save_checkpoints_secs", seconds)

    @property
    def is_chief(self) -> bool:
        """True: every process is the chief of a training of its own."""
        return True

    def replace(self, **changes: Any) -> RunConfig:
        """Give a copy with other values."""
        if "save_checkpoints_steps" in changes:
            changes.setdefault("save_checkpoints_secs", None)
        elif "save_checkpoints_secs" in changes:
            changes["save_checkpoints_steps"] = None
        return dataclasses.replace(self, **changes)


class _Spec(NamedTuple):
    mode: str
    predictions: Any
    loss: Any
    train_op: Any
    eval_metric_ops: dict[str, tuple[Any, Any]]
    export_outputs: Any
    training_chief_hooks: tuple[Any, ...]
    training_hooks: tuple[Any, ...]
    scaffold: Any
    evaluation_hooks: tuple[Any, ...]
    prediction_hooks: tuple[Any, ...]


class EstimatorSpec(_Spec):
    """What a model function returns."""

    __slots__ = ()

    def __new__(
        cls,
        mode: str,
        predictions: Any = None,
        loss: Any = None,
        train_op: Any = None,
        eval_metric_ops: Mapping[str, tuple[Any, Any]] | None = None,
        export_outputs: Any = None,
        training_chief_hooks: Iterable[Any] | None = None,
        training_hooks: Iterable[Any] | None = None,
        scaffold: Any = None,
        evaluation_hooks: Iterable[Any] | None = None,
        prediction_hooks: Iterable[Any] | None = None,
    ) -> EstimatorSpec:
        """Check and keep what a model function built.

        Args:
            mode: The mode the function was called with.
            predictions: A tensor or a dict of tensors, with an example in each row; for PREDICT.
            loss: A scalar; for TRAIN and EVAL.
            train_op: The operation of a step; for TRAIN. It counts the global step.
            eval_metric_ops: By name, a pair of value and update from `tf.metrics`.
            export_outputs: Kept; nothing is exported.
            training_chief_hooks: Hooks of the training, as `training_hooks`: every process is a chief.
            training_hooks: Hooks of the training.
            scaffold: A `tf.train.Scaffold`.
            evaluation_hooks: Hooks of the evaluation.
            prediction_hooks: Hooks of the prediction.

        Raises:
            ValueError: Something that the mode needs is missing, the mode is none, or the loss is no scalar.
            TypeError: A metric is no pair, or a hook is no SessionRunHook.
        """
        needed = {
            ModeKeys.TRAIN: {"loss": loss, "train_op": train_op},
            ModeKeys.EVAL: {"loss": loss},
            ModeKeys.PREDICT: {"predictions": predictions},
        }
        if mode not in needed:
            raise ValueError(f"mode is {mode!r}; it is one of tf.estimator.ModeKeys")
        for name, value in needed[mode].items():
            if value is None:
                raise ValueError(f"EstimatorSpec needs {name} when mode is {mode!r}")
        if loss is not None:
            loss = tf.convert_to_tensor(loss)
            if loss.shape.num_elements() not in (1, None):
                raise ValueError(f"the loss must be a scalar; its shape is {loss.shape}")
            loss = loss if loss.shape.ndims == 0 else tf.reshape(loss, [])
        metrics = dict(eval_metric_ops or {})
        for name, pair in metrics.items():
            if not isinstance(pair, tuple) or len(pair) != 2:
                raise TypeError(f"the metric {name!r} must be a pair of value and update, as tf.metrics gives it")
        return super().__new__(
            cls,
            mode,
            predictions,
            loss,
            train_op,
            metrics,
            export_outputs,
            checked_hooks(training_chief_hooks),
            checked_hooks(training_hooks),
            scaffold,
            checked_hooks(evaluation_hooks),
            checked_hooks(prediction_hooks),
        )


class TrainSpec(NamedTuple):
    """What `train_and_evaluate` trains with; as the arguments of `Estimator.train`."""

    input_fn: Callable[..., Any]
    max_steps: int | None = None
    hooks: Iterable[Any] | None = None
    saving_listeners: Iterable[Any] | None = None


class EvalSpec(NamedTuple):
    """What `train_and_evaluate` evaluates with; as the arguments of `Estimator.evaluate`.

    `throttle_secs` is the least time between two evaluations while it trains; `exporters` must be None.
    """

    input_fn: Callable[..., Any]
    steps: int | None = 100
    name: str | None = None
    hooks: Iterable[Any] | None = None
    exporters: Any = None
    start_delay_secs: float = 120
    throttle_secs: float = 600


def checked_hooks(hooks: Iterable[Any] | None) -> tuple[Any, ...]:
    """Give hooks as a tuple. Raises TypeError when one is no SessionRunHook."""
    checked = tuple(hooks or ())
    for hook in checked:
        if not isinstance(hook, tf.train.SessionRunHook):
            raise TypeError(f"a hook must be a tf.train.SessionRunHook, not {hook!r}")
    return checked
