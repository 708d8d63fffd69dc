"""The private names of frameworks that dl_comm depends on, in one list, and the check that they are still there.

A framework may drop such a name, or stop calling it, in any version. Where a result would then be wrong without an
error, `check` fails when a script starts to use it. Tests walk the list, and fail for a private name in the source that
is not in it.

Thread rule: any thread.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Iterator
from types import CodeType
from typing import Any, NamedTuple

from dl_comm._base.errors import StateError


class PrivateName(NamedTuple):
    """A name, or a use of it by the framework, on which dl_comm depends."""

    framework: str
    """Who checks it: torch, tensorflow, keras (on each backend, or on one of them) or tf1."""
    name: str
    """The name."""
    where: str
    """What has the name, or uses it: a module, and after a colon a name in it."""
    purpose: str
    """What dl_comm needs it for."""
    is_used: bool = False
    """`where` is a function of the framework that must use the name."""
    is_checked: bool = True
    """Without the name `check` fails. Otherwise dl_comm does without it, or fails where it uses it."""


_OPTIMIZER = "keras.src.optimizers.base_optimizer:BaseOptimizer"
_TF_TRAINER = "keras.src.backend.tensorflow.trainer:TensorFlowTrainer"
_TRAINERS = {
    "tensorflow": _TF_TRAINER,
    "torch": "keras.src.backend.torch.trainer:TorchTrainer",
    "jax": "keras.src.backend.jax.trainer:JAXTrainer",
}
_CONTEXT = "tensorflow.python.ops.control_flow_ops:ControlFlowContext"
_XLA = "refuse to run inside a function that XLA compiles"

PRIVATE_NAMES = (
    PrivateName("torch", "_execution_engine", "torch.autograd:Variable", "detect the end of backward"),
    PrivateName("torch", "_current_graph_task_id", "torch._C", "detect the end of backward"),
    PrivateName(
        "torch",
        "_step_supports_amp_scaling",
        "torch.amp.grad_scaler:GradScaler.step",
        "let a GradScaler skip a step on all ranks or on none",
        is_used=True,
    ),
    PrivateName("torch", "_version", "torch:Tensor", "find gradients that were changed during their allreduce"),
    PrivateName("torch", "_is_view", "torch:Tensor", "find gradients that were changed during their allreduce"),
    PrivateName("torch", "_foreach_mul_", "torch", "add means of earlier steps"),
    PrivateName("torch", "_foreach_add_", "torch", "add means of earlier steps"),
    PrivateName("torch", "_storage_Use_Count", "torch._C", "average gradients in place", is_checked=False),
    PrivateName("torch", "_cdata", "torch:UntypedStorage", "average gradients in place", is_checked=False),
    PrivateName(
        "torch", "_current_level", "torch.autograd.forward_ad", "skip the search for tangents", is_checked=False
    ),
    PrivateName(
        "torch", "_register_effectful_op", "torch._higher_order_ops.effects", "keep calls in graphs", is_checked=False
    ),
    PrivateName("torch", "_EffectType", "torch._higher_order_ops.effects", "keep calls in graphs", is_checked=False),
    PrivateName("torch", "_disable_dynamo", "torch._compile", "keep hooks out of compiled graphs"),
    PrivateName(
        "torch",
        "_dynamo_marked_constant",
        "torch._dynamo.decorators:assume_constant_result",
        "compile calls with a group",
        is_used=True,
        is_checked=False,
    ),
    PrivateName("tensorflow", "_get_control_flow_context", "tensorflow:Graph", _XLA),
    PrivateName("tensorflow", "IsXLAContext", _CONTEXT, _XLA),
    PrivateName("tensorflow", "outer_context", _CONTEXT, _XLA),
    PrivateName("tensorflow", "outer_graph", "tensorflow.python.framework.func_graph:FuncGraph", _XLA),
    PrivateName(
        "tensorflow",
        "experimental_acd_manager",
        "tensorflow.python.framework.auto_control_deps:AutomaticControlDependencies.__enter__",
        "run calls by name in any order",
        is_used=True,
    ),
    PrivateName(
        "tensorflow",
        "run_independently",
        "tensorflow.python.framework.auto_control_deps:AutomaticControlDependencies",
        "run calls by name in any order",
    ),
    PrivateName(
        "keras",
        "_clip_gradients",
        f"{_OPTIMIZER}._backend_apply_gradients",
        "average accumulated gradients before they are applied",
        is_used=True,
    ),
    PrivateName(
        "keras", "_backend_apply_gradients", f"{_OPTIMIZER}.apply", "average accumulated gradients", is_used=True
    ),
    PrivateName("keras", "_trainable_variables", f"{_OPTIMIZER}.build", "name the gradients", is_used=True),
    PrivateName(
        "keras",
        "_accumulated_gradients",
        f"{_OPTIMIZER}.build",
        "leave accumulated gradients out of broadcasts",
        is_used=True,
    ),
    PrivateName(
        "keras",
        "loss_scale_factor",
        "keras.src.optimizers.loss_scale_optimizer:LossScaleOptimizer.__init__",
        "refuse a LossScaleOptimizer around a DistributedOptimizer",
        is_used=True,
    ),
    *(
        PrivateName(
            f"keras on {backend}",
            "train_function",
            f"{trainer}.make_train_function",
            "trace a step again",
            is_used=True,
        )
        for backend, trainer in _TRAINERS.items()
    ),
    PrivateName(
        "keras on tensorflow",
        "train_function",
        f"{_TF_TRAINER}.fit",
        "broadcast before the first step",
        is_used=True,
    ),
    PrivateName(
        "keras on tensorflow",
        "_call_has_training_arg",
        f"{_TF_TRAINER}.train_step",
        "build a model as its first step would",
        is_used=True,
    ),
    PrivateName(
        "keras",
        "_moments",
        "keras.src.layers.normalization.batch_normalization:BatchNormalization.call",
        "normalize over the batches of all ranks",
        is_used=True,
    ),
    PrivateName(
        "tf1",
        "_listeners",
        "tensorflow.python.training.basic_session_run_hooks:CheckpointSaverHook.__init__",
        "tell the listeners of an estimator of checkpoints",
        is_used=True,
    ),
)


@functools.cache
def check(framework: str) -> None:
    """Raise StateError if the installed version lacks one of a framework's private names, or does not use it."""
    for each in PRIVATE_NAMES:
        if each.framework == framework and each.is_checked and not is_there(each):
            module = each.where.partition(".")[0].partition(":")[0]
            version = getattr(importlib.import_module(module), "__version__", "")
            raise StateError(
                f"dl_comm does not work with {module} {version}, which has no {each.name} in {each.where} any more, to "
                f"{each.purpose}: use a version that docs/wheels.md lists"
            )


def is_there(each: PrivateName) -> bool:
    """Return whether the installed framework has the name, or uses it."""
    module, _, path = each.where.partition(":")
    try:
        where: Any = importlib.import_module(module)
        for part in filter(None, path.split(".")):
            where = getattr(where, part)
    except (ImportError, AttributeError):
        return False
    if not each.is_used:
        return hasattr(where, each.name)
    while hasattr(where, "__wrapped__"):
        where = where.__wrapped__
    return each.name in _names_in(where.__code__)


def _names_in(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names_in(constant)
        elif isinstance(constant, str):
            yield constant
