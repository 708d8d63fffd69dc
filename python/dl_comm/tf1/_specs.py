"""Settings of an Estimator: modes, configuration, and the specs of models, training and evaluation.

Thread rule: immutable values.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import tensorflow

tf = tensorflow.compat.v1

_DEFAULT_SECONDS = 600


class ModeKeys:
    """The modes of a model function."""

    TRAIN = "train"
    EVAL = "eval"
    PREDICT = "infer"


@dataclasses.dataclass(frozen=True)
class RunConfig:
    """The configuration of an Estimator.

    Attributes:
        model_dir: The folder of checkpoints and summaries.
        tf_random_seed: The seed of the graphs.
        save_summary_steps: Steps between summaries; None or 0: no summaries.
        save_checkpoints_steps: Steps between checkpoints. Default: a checkpoint every 600 seconds.
        save_checkpoints_secs: Seconds between checkpoints. None for both: no checkpoints.
        session_config: A `tf.ConfigProto`; None: soft placement.
        keep_checkpoint_max: The number of checkpoints to keep; None or 0: all.
        keep_checkpoint_every_n_hours: Hours between additional checkpoints to keep.
        log_step_count_steps: Steps between INFO lines with loss and speed.

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
        """True: every process is the chief of its own training."""
        return True

    def replace(self, **changes: Any) -> RunConfig:
        """Return a copy with changed values."""
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
    """The result of a model function."""

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
        """Check and store the parts of a model.

        Args:
            mode: The mode that the model function was called with.
            predictions: A tensor or a dict of tensors, with one example per row; for PREDICT.
            loss: A scalar; for TRAIN and EVAL.
            train_op: The operation of a step, which increments the global step; for TRAIN.
            eval_metric_ops: Pairs of value and update from `tf.metrics`, by name.
            export_outputs: Stored, but not used.
            training_chief_hooks: Training hooks, as `training_hooks`: every process is a chief.
            training_hooks: Training hooks.
            scaffold: A `tf.train.Scaffold`.
            evaluation_hooks: Evaluation hooks.
            prediction_hooks: Prediction hooks.

        Raises:
            ValueError: The mode is invalid, an argument that it needs is missing, or the loss is not a scalar.
            TypeError: A metric is not a pair, or a hook is not a SessionRunHook.
        """
        needed = {
            ModeKeys.TRAIN: {"loss": loss, "train_op": train_op},
            ModeKeys.EVAL: {"loss": loss},
            ModeKeys.PREDICT: {"predictions": predictions},
        }
        if mode not in needed:
            raise ValueError(f"invalid mode: {mode!r} (expected one of tf.estimator.ModeKeys)")
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
                raise TypeError(f"the metric {name!r} must be a pair of value and update, as from tf.metrics")
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
    """Arguments of `Estimator.train` for `train_and_evaluate`."""

    input_fn: Callable[..., Any]
    max_steps: int | None = None
    hooks: Iterable[Any] | None = None
    saving_listeners: Iterable[Any] | None = None


class EvalSpec(NamedTuple):
    """Arguments of `Estimator.evaluate` for `train_and_evaluate`.

    `throttle_secs` is the minimum time between evaluations during training; `exporters` must be None.
    """

    input_fn: Callable[..., Any]
    steps: int | None = 100
    name: str | None = None
    hooks: Iterable[Any] | None = None
    exporters: Any = None
    start_delay_secs: float = 120
    throttle_secs: float = 600


def checked_hooks(hooks: Iterable[Any] | None) -> tuple[Any, ...]:
    """Return the hooks as a tuple. Raises TypeError when one is not a SessionRunHook."""
    checked = tuple(hooks or ())
    for hook in checked:
        if not isinstance(hook, tf.train.SessionRunHook):
            raise TypeError(f"a hook must be a tf.train.SessionRunHook, not {hook!r}")
    return checked
