"""Compares torch.distributed's backend `dl_comm` with gloo, between the ranks of one host, in the same processes.

Every rank has a process group of each backend. In each round (`--rounds`) the contenders take turns, starting with
another one; a figure is the median over the rounds of a round's median time, of the slowest rank. Collectives are
blocking, of float32 in ordinary memory, from a ring of buffers; a size is that of the longer of input and output.
`core` is `dl_comm.torch.allreduce` in place: the difference is what torch.distributed and the backend add.

Training: unchanged DistributedDataParallel (`ddp`) and `fully_shard` of a transformer. `no_sync` is a step without
communication; a step's time above it is the exposed communication. Each rank computes with one thread.
"""
