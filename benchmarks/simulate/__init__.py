"""What an average takes on 2 to 8192 hosts, by a simulation of the messages of dl_comm's algorithms between hosts.

    python -m benchmarks.simulate [--out FOLDER] [--ranks 2] [--host server] [--network LATENCY MESSAGE BYTE]
    python -m benchmarks.simulate --check [--rates 100mbit 1gbit] [--hosts 2 3 4] ...           # as root

What is simulated: the chunks of a call in their order on the channels, two under way on each; what copying and adding
up in the host takes; every round of messages, on links that the lanes and channels of a host share. A message takes its
latency, and on the link a time for each byte; further messages of one exchange are ready one after the other (LogGP:
Alexandrov, Ionescu, Schauser and Scheiman, 1995). The network between the links carries all; all hosts are equally fast
and call at once; nothing else runs. So what is predicted is what the algorithms and the wires allow, not what a busy
cluster gives.

The host's constants are measured where it runs; those of networks are presets, with their sources in `constants.py`.
What is told beside the seconds is how near the call comes to the time in which 2 (n - 1) / n of its bytes pass a link.

`--check` compares the simulation with runs: hosts are network namespaces of this machine whose links tc caps. All hosts
share this machine's processors, so the short calls tell how Linux switches between processes more than what a network
takes. The network's constants are then those that dl_comm has measured in the same runs, but for the time of a byte,
which is what the cap says; the host's are those of this machine.
"""
