"""Helpers that scripts import."""
