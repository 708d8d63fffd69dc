"""What the benchmarks share: processes that take turns and how they are started, the machine, tables, pictures."""
