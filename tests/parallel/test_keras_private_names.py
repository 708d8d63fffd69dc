"""The list of private names: the installed TensorFlow and Keras have them all; without one, a script fails early."""

from __future__ import annotations

import pytest

tf = pytest.importorskip("tensorflow")
keras = pytest.importorskip("keras", minversion="3.0")

import dl_comm  # noqa: E402
import dl_comm.keras as dk  # noqa: E402
import dl_comm.tensorflow as dt  # noqa: E402
from dl_comm._base.private_names import PrivateName, check, is_there  # noqa: E402
from private_names import fails_without, listed  # noqa: E402


@pytest.fixture(autouse=True)
def _session():
    """Keras keeps the type of the first layer for later ones."""
    yield
    keras.backend.clear_session()


@pytest.mark.parametrize("library", ["tensorflow", "keras", "keras on tensorflow", "tf1"])
def test_the_libraries_have_them(library: str) -> None:
    assert [each for each in listed(library) if not is_there(each)] == []


@pytest.mark.parametrize("gone", [*listed("keras"), *listed("keras on tensorflow")], ids=lambda each: each.name)
def test_keras_checks_them(gone: PrivateName, monkeypatch: pytest.MonkeyPatch) -> None:
    fails_without(monkeypatch, gone, lambda: dk.DistributedOptimizer(keras.optimizers.SGD()))
    fails_without(monkeypatch, gone, dk.SyncBatchNormalization)
    fails_without(monkeypatch, gone, dk.BroadcastCallback)


@pytest.mark.parametrize("gone", listed("tensorflow"), ids=lambda each: each.name)
def test_a_graph_checks_them(gone: PrivateName, monkeypatch: pytest.MonkeyPatch) -> None:
    with tf.Graph().as_default():
        fails_without(monkeypatch, gone, lambda: dt.allreduce(tf.ones(2)))


def test_an_optimizer_that_no_longer_clips_where_it_applies(monkeypatch: pytest.MonkeyPatch) -> None:
    """Accumulated gradients would not be averaged."""
    base = next(each for each in keras.optimizers.SGD.__mro__ if "_backend_apply_gradients" in vars(each))
    monkeypatch.setattr(base, "_backend_apply_gradients", lambda self, grads, trainable_variables: None)
    check.cache_clear()
    with pytest.raises(dl_comm.StateError, match="_clip_gradients"):
        dk.DistributedOptimizer(keras.optimizers.SGD())
    check.cache_clear()
