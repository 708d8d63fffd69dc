"""Averages of dl_comm beside those of others and beside the limit of the machine, in one run.

    python -m benchmarks.allreduce [--ranks 2 3 4] [--openmpi PREFIX] [--out FOLDER] ...

Method. Every contender is a job of `ranks` processes on this host that stays alive and sleeps on a socket until it is
its turn; only one works at any time. A turn is: take a ring of buffers, fill them, and for each iteration meet at a
barrier in shared memory (the same for all contenders) and time one operation on the next buffer of the ring. At the
barrier ranks sleep, after some microseconds, until all are there, since one that has not ended may need the processors
or the others' threads; then they spin, so that all start at once. Every rank takes its time; that of the slowest rank
counts. The turns of the contenders alternate, in rounds, each round in another order. What is reported is the median
over all iterations of all rounds, and the quartiles. A contender that has taken 20 seconds in a case gets no further
turn there, and one that did not end a turn within `--deadline-s` is not tried with longer buffers or lists.

Buffers are fresh: the ring is of 512 MiB a rank for buffers from 1 MiB; for smaller ones of twice the last-level cache
or 512 buffers, whichever is less. Where the iterations of a turn need fewer, no buffer is used twice. The result of the
first and the last iteration is compared with the mean, element by element; two iterations before the timed ones do not
count. Filling, checking and freeing are outside the times, also the freeing of results where a call returns new ones.

Contenders that average in place: all but the NumPy face and the torch face's `gradients`, which return new arrays and
pay for their memory. Peers sum up and divide. The limit has all buffers in shared memory, and each process averages its
share of all of them in place between two barriers; copy is a memcpy of the buffer on all ranks at once. Python
contenders run without the cyclic garbage collector, and with OMP_NUM_THREADS = processors / ranks, at least 1.

Lists of tensors are averaged by dl_comm in one call; by peers with one call a tensor (each), and in one flat buffer,
copied there and back within the time (flat). The limit's and the copy's lists are one buffer, or one copy a tensor.
"""
