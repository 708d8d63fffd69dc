"""Compares the collectives of dl_comm, from C, with those of MPICH, Open MPI and gloo, between the ranks of one host.

Every contender is started in turn, several times (`--rounds`); a figure is the median over the rounds of its median
time, of the slowest rank. Buffers are float32 in ordinary memory, from a ring of up to 64 buffers and 64 MiB. A size
is that of the longer of input and output. Small calls are timed in batches of 100. `limit` copies with memcpy, in
each rank's own memory, the bytes that the rank must copy if each moves once. The last columns are the time of the
fastest peer over ours, and ours over the limit. With two ranks also messages: half of a round trip, or a message in
each direction at once, always from the same memory; `-shared` is memory of dl_comm_alloc.
"""
