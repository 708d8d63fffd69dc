"""Benchmarks of dl_comm; README.md describes how to run each."""
