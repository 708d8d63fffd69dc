"""The collectives and messages for tensors of every framework: those of `_ops` for arrays, else those of a binding.

Thread rule: that of the functions.
"""

from __future__ import annotations

from dl_comm import _messages, _ops
from dl_comm._binding import of_every_framework

allreduce = of_every_framework(_ops.allreduce)
reduce = of_every_framework(_ops.reduce)
all_gather = of_every_framework(_ops.all_gather)
gather = of_every_framework(_ops.gather)
scatter = of_every_framework(_ops.scatter)
reduce_scatter = of_every_framework(_ops.reduce_scatter)
all_to_all = of_every_framework(_ops.all_to_all)
send = of_every_framework(_messages.send)
recv = of_every_framework(_messages.recv)
sendrecv = of_every_framework(_messages.sendrecv)
