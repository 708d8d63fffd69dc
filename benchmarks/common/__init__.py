"""Shared by the benchmarks: processes that run trials, machine description, tables, plots."""
