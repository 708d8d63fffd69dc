"""Compares dl_comm's allreduce with other libraries and with the memory-bandwidth limit, in one run on one host.

    python -m benchmarks.allreduce [--ranks 2 3 4] [--openmpi PREFIX] [--out FOLDER] ...

Method. Each contender is a job of `ranks` processes that stays alive for the whole run. Between its trials it sleeps on
a socket; only one contender runs at a time. A trial allocates and fills a ring of buffers. Each iteration waits at a
barrier in shared memory (the same for all contenders), then times one operation on the next buffer of the ring. The
barrier first sleeps until all ranks have arrived, because a missing rank may need the processors. Then it spins, so
that all ranks start at the same time. The slowest rank's time counts. Trials of the contenders alternate in rounds,
each round in another order. The tables show the median and the quartiles over all iterations of all rounds. A contender
that has used 20 seconds in a case gets no further trial there. One that exceeds `--deadline-s` in a trial skips longer
buffers and lists.

Buffers are fresh. For buffers of 1 MiB or more the ring has 512 MiB a rank. For smaller ones it has twice the
last-level cache or 512 buffers, whichever is less. The first and the last result are compared with the mean, element by
element. Two warm-up iterations are not counted. Filling, checking and freeing are not timed.

`line` is the time, after the case, that a cache line takes from one processor to another: about 30 ns if they share a
cache ("near"), else more than 100 ("far"). `numpy` over `numpy-inplace` is what results in new arrays cost.

All contenders average in place, except the NumPy binding and `gradients` of the torch binding, which return new arrays
and pay for the allocation. Peers sum, then divide. In the limit, all buffers lie in shared memory and each process
averages its share of all of them in place, between two barriers. `copy` is a memcpy of the buffer on all ranks at the
same time. Python contenders run without the cyclic garbage collector, with OMP_NUM_THREADS = processors / ranks (at
least 1).

dl_comm averages a list of tensors in one call. Peers use one call a tensor (each), or copy the list into one flat
buffer and back, which is timed (flat). For the limit a list is one buffer; for `copy` it is one memcpy a tensor.
"""
