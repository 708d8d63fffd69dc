"""Compares the collectives of dl_comm, from C, with those of MPICH, Open MPI and gloo, between the ranks of one host.

Every contender is started in turn, several times (`--rounds`); a figure is the median over the rounds of its median
time, of the slowest rank. Buffers are float32 in ordinary memory, from a ring larger than the caches. A size is that of
the longer of input and output. Small calls are timed in batches of 100. The last column is the time of the fastest peer
over ours. With two ranks also messages: half of a round trip, or a message in each direction at once, always from the
same memory; `-shared` is memory of dl_comm_alloc.
"""
