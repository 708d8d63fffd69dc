"""What the benchmarks share: processes that take trials and how they are started, the machine, tables, pictures."""
