"""Predicts the time of an allreduce on 2 to 8192 hosts by simulating the messages between the hosts.

    python -m benchmarks.simulate [--out FOLDER] [--ranks 2] [--host server] [--network LATENCY MESSAGE BYTE]
    python -m benchmarks.simulate --notices
    python -m benchmarks.simulate --check [--rates 100mbit 1gbit] [--hosts 2 3 4] ...           # as root

The model has the chunks of a call on the channels, up to eight in flight on each; copies and additions in host memory;
and every round of messages. The shards and channels of a host share its link. A message takes its latency and, on the
link, a time for each byte. Further messages of one exchange become ready one after the other (LogGP: Alexandrov,
Ionescu, Schauser and Scheiman, 1995). The model assumes a network without contention, equally fast hosts, calls that
start at the same time, and no other load. So it predicts the limits of the algorithms and links, not the speed of a
busy cluster.

Host constants are measured on this host. Network constants are presets; `constants.py` has their sources. The table
also compares each time with the time in which 2 (n - 1) / n of the bytes pass a link.

`--notices` shows what the flags of a round cost on one host of up to 128 ranks, flat and in a tree.

`--check` compares predictions with measurements on network namespaces whose links tc caps. These hosts share this
machine's processors, so short calls measure process switches rather than the network. The network constants are those
that dl_comm measured in the same runs, except the time of a byte, which follows from the cap.
"""
