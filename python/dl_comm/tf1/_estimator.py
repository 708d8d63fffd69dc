"""`tf.estimator`: the core of TensorFlow 1's Estimator, on monitored sessions.

Supported: `Estimator` with `train`, `evaluate` and `predict`, `EstimatorSpec`, `RunConfig`, `ModeKeys`,
`inputs.numpy_input_fn`, `train_and_evaluate` in one process, and the hooks. Not supported: canned estimators, export,
warm start and TensorFlow's distribution. Each process is a chief and trains alone; dl_comm's calls in the model
function and in hooks connect the ranks. So only one rank may use a given `model_dir`; with None each rank creates its
own.

Thread rule: one thread uses an Estimator.
"""

from __future__ import annotations

import copy
import dataclasses
import inspect
import itertools
import os
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow

from dl_comm.tf1._inputs import features_and_labels, numpy_input_fn
from dl_comm.tf1._specs import EstimatorSpec, EvalSpec, ModeKeys, RunConfig, TrainSpec, checked_hooks

tf = tensorflow.compat.v1


class Estimator:
    """Trains and evaluates the model of a model function, and predicts with it; stores checkpoints in a folder."""

    def __init__(
        self,
        model_fn: Callable[..., EstimatorSpec],
        model_dir: str | None = None,
        config: RunConfig | None = None,
        params: Any = None,
        warm_start_from: Any = None,
    ) -> None:
        """Create an Estimator; builds no graph yet.

        Args:
            model_fn: `model_fn(features, labels, mode)`, optionally with `params` and `config`, all passed by name. It
                returns an EstimatorSpec. `labels` may be omitted if there are no labels.
            model_dir: The folder of checkpoints; None: that of `config`, else a new temporary one.
            config: The configuration.
            params: Passed to the model function, and to input functions that take `params`.
            warm_start_from: Must be None.

        Raises:
            TypeError: `model_fn` is not a function, or `config` is not a RunConfig.
            ValueError: `params` is given but `model_fn` does not take it, or `config` has another `model_dir`.
        """
        if isinstance(model_fn, EstimatorSpec) or not callable(model_fn):
            raise TypeError(f"model_fn must be a function that returns an EstimatorSpec, not {type(model_fn).__name__}")
        if config is not None and not isinstance(config, RunConfig):
            raise TypeError(f"config must be a tf.estimator.RunConfig, not {type(config).__name__}")
        if warm_start_from is not None:
            raise ValueError(
                "dl_comm.tf1 does not support warm_start_from; use tf.train.init_from_checkpoint in model_fn"
            )
        if params is not None and "params" not in _parameters(model_fn):
            raise ValueError("model_fn does not take params, but params were given")
        config = RunConfig() if config is None else config
        if model_dir is not None and config.model_dir not in (None, model_dir):
            raise ValueError(f"model_dir is {model_dir!r} here and {config.model_dir!r} in the RunConfig")
        folder = os.fspath(model_dir or config.model_dir or tempfile.mkdtemp())
        self._model_fn = model_fn
        self._config = dataclasses.replace(config, model_dir=folder)
        self._params = copy.deepcopy({} if params is None else params)

    @property
    def model_dir(self) -> str:
        """The folder of checkpoints."""
        return str(self._config.model_dir)

    @property
    def config(self) -> RunConfig:
        """The configuration."""
        return self._config

    @property
    def params(self) -> Any:
        """A copy of the parameters."""
        return copy.deepcopy(self._params)

    def latest_checkpoint(self) -> str | None:
        """Return the name of the newest checkpoint, or None."""
        found = tf.train.latest_checkpoint(self.model_dir)
        return None if found is None else str(found)

    def get_variable_names(self) -> list[str]:
        """Return the names of the variables in the newest checkpoint. Raises ValueError without a checkpoint."""
        return [name for name, _ in tf.train.list_variables(self._require_checkpoint())]

    def get_variable_value(self, name: str) -> Any:
        """Return a variable of the newest checkpoint as an array. Raises ValueError without a checkpoint."""
        return tf.train.load_variable(self._require_checkpoint(), name)

    def eval_dir(self, name: str | None = None) -> str:
        """Return the folder of summaries for evaluations with this name."""
        return os.path.join(self.model_dir, f"eval_{name}" if name else "eval")

    def train(
        self,
        input_fn: Callable[..., Any],
        hooks: Iterable[Any] | None = None,
        steps: int | None = None,
        max_steps: int | None = None,
        saving_listeners: Iterable[Any] | None = None,
    ) -> Estimator:
        """Train, starting from the newest checkpoint in `model_dir` if there is one, and write checkpoints.

        Args:
            input_fn: Returns the features and labels of a step: tensors, or a dataset of such pairs.
            hooks: Hooks for this training; they run before those of the EstimatorSpec.
            steps: The number of steps to train now.
            max_steps: The global step to stop at; does nothing if the checkpoint has reached it. Without `steps` and
                `max_steps`, training ends with the data.
            saving_listeners: `tf.train.CheckpointSaverListener`s.

        Returns:
            The Estimator.

        Raises:
            ValueError: Both `steps` and `max_steps` are given, or one is not positive.
            TypeError: A hook is not a SessionRunHook.
        """
        if steps is not None and max_steps is not None:
            raise ValueError("train takes steps or max_steps, not both")
        for name, number in (("steps", steps), ("max_steps", max_steps)):
            if number is not None and number <= 0:
                raise ValueError(f"invalid {name}: {number} (expected > 0)")
        given, listeners = list(checked_hooks(hooks)), list(saving_listeners or ())
        if max_steps is not None and self._trained_steps() >= max_steps:
            tf.logging.info("Skipping training: the checkpoint has max_steps already.")
            return self

        config = self._config
        with tf.Graph().as_default():
            features, labels, spec, step = self._build_graph(input_fn, ModeKeys.TRAIN)
            del features, labels
            tf.summary.scalar("loss", spec.loss)
            scaffold = self._scaffold(spec)
            every = config.log_step_count_steps
            given.append(tf.train.NanTensorHook(spec.loss))
            if every:
                given.append(tf.train.LoggingTensorHook({"loss": spec.loss, "step": step}, every_n_iter=every))
            given += [*spec.training_hooks, *spec.training_chief_hooks]
            if steps is not None or max_steps is not None:
                # After hooks that broadcast the global step, because it counts from that step.
                given.append(tf.train.StopAtStepHook(num_steps=steps, last_step=max_steps))
            savers = [hook for hook in given if isinstance(hook, tf.train.CheckpointSaverHook)]
            if savers:
                savers[0]._listeners.extend(listeners)
            elif config.save_checkpoints_steps or config.save_checkpoints_secs:
                given.append(
                    tf.train.CheckpointSaverHook(
                        self.model_dir,
                        save_secs=config.save_checkpoints_secs or None,
                        save_steps=config.save_checkpoints_steps or None,
                        scaffold=scaffold,
                        listeners=listeners,
                    )
                )
            elif listeners:
                raise ValueError("saving_listeners need checkpoints, and the RunConfig has none")
            with tf.train.MonitoredTrainingSession(
                checkpoint_dir=self.model_dir,
                scaffold=scaffold,
                hooks=given,
                save_checkpoint_secs=None,
                save_checkpoint_steps=None,
                save_summaries_steps=config.save_summary_steps or None,
                save_summaries_secs=None,
                config=self._session_config(),
                log_step_count_steps=every,
            ) as session:
                while not session.should_stop():
                    session.run([spec.train_op, spec.loss])
        return self

    def evaluate(
        self,
        input_fn: Callable[..., Any],
        steps: int | None = None,
        hooks: Iterable[Any] | None = None,
        checkpoint_path: str | None = None,
        name: str | None = None,
    ) -> dict[str, Any]:
        """Compute the metrics of the EstimatorSpec over the data.

        Args:
            input_fn: Returns the features and labels of a step.
            steps: The number of steps; None: until the data end.
            hooks: Hooks for this evaluation; they run before those of the EstimatorSpec.
            checkpoint_path: The checkpoint; None: the newest one, or the initial values if there is none.
            name: Part of the name of the folder for summaries.

        Returns:
            The metrics by name, with `loss` (the mean over the steps) and `global_step`.

        Raises:
            ValueError: `steps` is not positive, or a metric is named `loss` or `global_step`.
            TypeError: A hook is not a SessionRunHook.
        """
        if steps is not None and steps <= 0:
            raise ValueError(f"invalid steps: {steps} (expected > 0)")
        given = checked_hooks(hooks)
        with tf.Graph().as_default():
            _, _, spec, step = self._build_graph(input_fn, ModeKeys.EVAL)
            metrics = dict(spec.eval_metric_ops)
            for taken in ("loss", "global_step"):
                if taken in metrics:
                    raise ValueError(f"a metric must not be named {taken!r}: evaluate adds this name")
            metrics["loss"] = tf.metrics.mean(spec.loss)
            update = tf.group(*(update for _, update in metrics.values()))
            values = {key: value for key, (value, _) in metrics.items()} | {"global_step": step}
            final = tf.train.FinalOpsHook(values)
            with self._restored_session(spec, checkpoint_path, [*given, *spec.evaluation_hooks, final]) as session:
                for _ in itertools.count() if steps is None else range(steps):
                    if session.should_stop():
                        break
                    session.run(update)
        results: dict[str, Any] = final.final_ops_values
        self._write_summary(results, name)
        return results

    def predict(
        self,
        input_fn: Callable[..., Any],
        predict_keys: str | Sequence[str] | None = None,
        hooks: Iterable[Any] | None = None,
        checkpoint_path: str | None = None,
        yield_single_examples: bool = True,
    ) -> Iterator[Any]:
        """Yield the predictions of the EstimatorSpec until the data end.

        Args:
            input_fn: Returns the features of a step; labels are ignored.
            predict_keys: The predictions to yield from a dict of predictions; None: all.
            hooks: Hooks for this prediction; they run before those of the EstimatorSpec.
            checkpoint_path: The checkpoint; None: the newest one, or the initial values if there is none.
            yield_single_examples: True: yield each example; False: yield batches.

        Yields:
            Arrays, or dicts of arrays if the predictions are a dict.

        Raises:
            ValueError: None of `predict_keys` is a prediction, or the predictions have different numbers of examples.
            TypeError: A hook is not a SessionRunHook.
        """
        given = checked_hooks(hooks)
        with tf.Graph().as_default():
            _, _, spec, _ = self._build_graph(input_fn, ModeKeys.PREDICT)
            predictions = spec.predictions
            if predict_keys is not None:
                keys = [predict_keys] if isinstance(predict_keys, str) else list(predict_keys)
                if not isinstance(predictions, Mapping) or not any(key in predictions for key in keys):
                    raise ValueError(f"the predictions have none of the keys {keys}")
                predictions = {key: predictions[key] for key in keys if key in predictions}
            monitored = self._restored_session(spec, checkpoint_path, [*given, *spec.prediction_hooks])
        # Outside the `with`: this graph must not be the default graph in the caller's code between yields.
        with monitored as session:
            while not session.should_stop():
                batch = session.run(predictions)
                if yield_single_examples:
                    yield from _examples(batch)
                else:
                    yield batch

    def _build_graph(self, input_fn: Callable[..., Any], mode: str) -> tuple[Any, Any, EstimatorSpec, Any]:
        """Build a mode in the default graph. Returns features, labels, the spec and the global step."""
        tf.set_random_seed(self._config.tf_random_seed)
        step = tf.train.get_or_create_global_step()
        offered = {"mode": mode, "params": self.params, "config": self._config}
        given = input_fn(**{name: offered[name] for name in _parameters(input_fn) if name in offered})
        features, labels = features_and_labels(given)
        if mode == ModeKeys.PREDICT:
            labels = None
        taken = _parameters(self._model_fn)
        if "labels" in taken:
            offered["labels"] = labels
        elif labels is not None:
            raise ValueError("model_fn does not take labels, but input_fn returns labels")
        arguments = {name: offered[name] for name in taken if name in offered}
        spec = self._model_fn(features=features, **arguments)
        if not isinstance(spec, EstimatorSpec):
            raise ValueError(f"model_fn must return an EstimatorSpec, not {type(spec).__name__}")
        return features, labels, spec, step

    def _scaffold(self, spec: EstimatorSpec) -> Any:
        if not tf.get_collection(tf.GraphKeys.SAVERS) and (spec.scaffold is None or spec.scaffold.saver is None):
            saver = tf.train.Saver(
                max_to_keep=self._config.keep_checkpoint_max,
                keep_checkpoint_every_n_hours=self._config.keep_checkpoint_every_n_hours,
                save_relative_paths=True,
                defer_build=True,
            )
            tf.add_to_collection(tf.GraphKeys.SAVERS, saver)
        return spec.scaffold or tf.train.Scaffold()

    def _restored_session(self, spec: EstimatorSpec, checkpoint_path: str | None, hooks: list[Any]) -> Any:
        creator = tf.train.ChiefSessionCreator(
            scaffold=self._scaffold(spec),
            checkpoint_filename_with_path=checkpoint_path or self.latest_checkpoint(),
            config=self._session_config(),
        )
        return tf.train.MonitoredSession(creator, hooks)

    def _session_config(self) -> Any:
        given = self._config.session_config
        return tf.ConfigProto(allow_soft_placement=True) if given is None else given

    def _require_checkpoint(self) -> str:
        checkpoint = self.latest_checkpoint()
        if checkpoint is None:
            raise ValueError(f"no checkpoint in {self.model_dir}")
        return checkpoint

    def _trained_steps(self) -> int:
        checkpoint = self.latest_checkpoint()
        return 0 if checkpoint is None else int(tf.train.load_variable(checkpoint, tf.GraphKeys.GLOBAL_STEP))

    def _write_summary(self, results: Mapping[str, Any], name: str | None) -> None:
        numbers = {key: value for key, value in results.items() if key != "global_step" and np.ndim(value) == 0}
        values = [tf.Summary.Value(tag=key, simple_value=float(value)) for key, value in numbers.items()]
        with tf.Graph().as_default():  # a FileWriter needs a graph even in eager mode
            writer = tf.summary.FileWriterCache.get(self.eval_dir(name))
        writer.add_summary(tf.Summary(value=values), int(results["global_step"]))
        writer.flush()


def train_and_evaluate(
    estimator: Estimator, train_spec: TrainSpec, eval_spec: EvalSpec
) -> tuple[dict[str, Any] | None, list[Any]]:
    """Train to `max_steps`; evaluate at checkpoints and at the end.

    Returns:
        The metrics of the last evaluation (None if there was nothing to train), and an empty list.

    Raises:
        ValueError: `eval_spec` has exporters.
    """
    if eval_spec.exporters:
        raise ValueError("dl_comm.tf1 does not support exporters")
    listener = _Evaluation(estimator, eval_spec)
    listeners = [*(train_spec.saving_listeners or ()), listener]
    estimator.train(
        train_spec.input_fn, hooks=train_spec.hooks, max_steps=train_spec.max_steps, saving_listeners=listeners
    )
    return listener.results, []


class _Evaluation(tf.train.CheckpointSaverListener):  # type: ignore[misc, name-defined]
    """Evaluates at checkpoints, except the initial one, at most every `throttle_secs`, and always at the last one."""

    def __init__(self, estimator: Estimator, spec: EvalSpec) -> None:
        self.results: dict[str, Any] | None = None
        self._estimator = estimator
        self._spec = spec
        self._last = time.monotonic()
        self._started = False

    def after_save(self, session: Any, global_step_value: int) -> None:
        due = time.monotonic() - self._last >= self._spec.throttle_secs
        if self._started and due:
            self._evaluate()
        self._started = True

    def end(self, session: Any, global_step_value: int) -> None:
        if self.results is None or self.results["global_step"] != global_step_value:
            self._evaluate()

    def _evaluate(self) -> None:
        spec = self._spec
        self.results = self._estimator.evaluate(spec.input_fn, spec.steps, spec.hooks, name=spec.name)
        self._last = time.monotonic()


def _parameters(function: Callable[..., Any]) -> list[str]:
    return list(inspect.signature(function).parameters)


def _examples(batch: Any) -> Iterator[Any]:
    if not isinstance(batch, Mapping):
        yield from batch
        return
    lengths = {len(rows) for rows in batch.values()}
    if len(lengths) != 1:
        raise ValueError(f"the predictions must have equal numbers of examples, not {sorted(lengths)}")
    for i in range(lengths.pop()):
        yield {key: rows[i] for key, rows in batch.items()}


_HOOKS = (
    "CheckpointSaverHook",
    "CheckpointSaverListener",
    "FeedFnHook",
    "FinalOpsHook",
    "GlobalStepWaiterHook",
    "LoggingTensorHook",
    "NanLossDuringTrainingError",
    "NanTensorHook",
    "ProfilerHook",
    "SecondOrStepTimer",
    "SessionRunArgs",
    "SessionRunContext",
    "SessionRunHook",
    "SessionRunValues",
    "StepCounterHook",
    "StopAtStepHook",
    "SummarySaverHook",
)

NAMES = {
    "Estimator": Estimator,
    "EstimatorSpec": EstimatorSpec,
    "EvalSpec": EvalSpec,
    "ModeKeys": ModeKeys,
    "RunConfig": RunConfig,
    "TrainSpec": TrainSpec,
    "train_and_evaluate": train_and_evaluate,
} | {name: getattr(tf.train, name) for name in _HOOKS}
"""The names of tf.estimator, except inputs."""

INPUTS = {"numpy_input_fn": numpy_input_fn}
"""The names of tf.estimator.inputs."""

INPUTS_GONE = {"pandas_input_fn": "tf.estimator.inputs.numpy_input_fn"}

GONE = dict.fromkeys(
    ("DNNClassifier", "DNNRegressor", "LinearClassifier", "LinearRegressor", "BaselineClassifier"),
    "tf.estimator.Estimator with a model function",
) | {"export": "tf.saved_model"}
"""Alternatives to removed names of tf.estimator."""
