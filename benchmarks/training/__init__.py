"""Steps of training on several ranks beside those of others and beside steps without communication, in one run.

    python -m benchmarks.training [--ranks 1 2 4] [--models mlp ...] [--out FOLDER] ...

Method. A case is a model on a number of ranks of this host. Its contenders are started together, each with as many
processes as there are ranks, stay alive, and sleep on a socket until it is their turn; only one works at any time. They
take turns in rounds, each round in another order. A turn is some steps (gradients to zero, forward, loss, backward,
update), each timed by every rank; the first ones of a turn do not count. A step's time is the mean over the ranks.
What is reported is the median over all steps of all rounds, and the quartiles.

Contenders: `one`, a process alone on the machine; `independent`, as many processes as ranks that train at the same time
and do not communicate; `ours`, dl_comm with its default options, through dl_comm.torch.DistributedOptimizer or, in
TensorFlow, dl_comm.tensorflow.gradients within a tf.function; `ddp`, torch's DistributedDataParallel on gloo with
buckets of 25 MB, gradient_as_bucket_view=True, and no broadcasts of buffers, its best case.

Exposed communication is the median step of a contender's turn less that of `independent` in the same round; the median
over the rounds counts. It is what the ranks pay for being many, beside what they pay for sharing processors, caches and
memory. It has everything in it that averaging costs, also the waiting for ranks that the system has held up, and on few
processors the work of threads that communicate. It may be negative where it is smaller than the noise. Beside it stands
what dl_comm tells itself: in torch `optimizer.communication()` (exposed, and busy, in which an average was under way),
in TensorFlow `dl_comm.get_waited()`, the time from a call to its result.

All processes compute with one thread (OMP_NUM_THREADS=1, TensorFlow's intra-op and inter-op threads too). The data is
random, made before the steps, other data on each rank. All start with the same parameters, and make the same number of
steps before the first turn, in which dl_comm also looks for its size of buckets. After a few steps, then, and after the
last turn, the parameters of all ranks of a contender must be the same, bit for bit, and those of `independent` must
not, which have seen other data. After the few steps the parameters of the contenders must be about the same: the
distance between them, as a share of the way from the first parameters, is in the results. On one rank they are compared
with training without anything. TensorFlow on several ranks has no other contender to be compared with.
"""
