"""Compares training steps of dl_comm, of torch's DistributedDataParallel, and without communication, in one run.

    python -m benchmarks.training [--ranks 1 2 4] [--models mlp ...] [--out FOLDER] ...

Method. A case is a model on a number of ranks of this host. Its contenders start together, each with one process a
rank, stay alive, and sleep on a socket between their trials; only one contender runs at a time. Trials alternate in
rounds, each round in another order. A trial is a number of steps (zero gradients, forward, loss, backward, update).
Every rank times each step; the first steps of a trial are not counted. A step's time is the mean over the ranks. The
tables show the median and the quartiles over all steps of all rounds.

Contenders: `one`, a single process on the machine; `independent`, as many processes as ranks, which train at the same
time without communication; `ours`, dl_comm with default options, through dl_comm.torch.DistributedOptimizer or, in
TensorFlow, dl_comm.tensorflow.gradients in a tf.function; `ddp`, torch's DistributedDataParallel on gloo with buckets
of 25 MB, gradient_as_bucket_view=True and no buffer broadcasts, its best case.

Exposed communication is the median step of a contender's trial minus that of `independent` in the same round; the
median over the rounds counts. It contains all costs of communication: waits for delayed ranks and, on few processors,
the work of communication threads. Sharing processors, caches and memory is not part of it. It can be negative when it
is below the noise. The table also has dl_comm's own values: in torch `optimizer.communication()`, in TensorFlow
`dl_comm.get_waited()`, the time from a call to its result.

All processes compute with one thread (OMP_NUM_THREADS=1; TensorFlow's intra-op and inter-op threads too). The data is
random, generated before the steps, and different on each rank. All start with the same parameters and make the same
number of steps before the first trial; dl_comm finds its bucket size in these. After a few steps and after the last
trial, the parameters of all ranks of a contender must be bit-identical; those of `independent` must differ, because
they saw different data. After the few steps, the parameters of the contenders must be close: the results have their
distance relative to the distance from the initial parameters. On one rank they are compared with plain training.
TensorFlow on several ranks has no other contender to compare with.
"""
