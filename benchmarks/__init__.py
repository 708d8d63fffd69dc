"""Benchmarks of dl_comm; README.md tells how to run each."""
