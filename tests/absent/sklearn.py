"""Hides sklearn, which Keras imports where it is installed; tests/run.sh has the reason."""

raise ImportError("hidden by tests/absent")
