"""Helpers of the launcher that scripts import."""
