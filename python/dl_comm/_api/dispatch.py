"""The collectives and messages for tensors of every framework: those of `_arrays` for arrays, else those of a binding.

Thread rule: that of the functions.
"""

from __future__ import annotations

from dl_comm._api.binding import of_every_framework
from dl_comm._arrays import collectives, messages

allreduce = of_every_framework(collectives.allreduce)
reduce = of_every_framework(collectives.reduce)
all_gather = of_every_framework(collectives.all_gather)
gather = of_every_framework(collectives.gather)
scatter = of_every_framework(collectives.scatter)
reduce_scatter = of_every_framework(collectives.reduce_scatter)
all_to_all = of_every_framework(collectives.all_to_all)
send = of_every_framework(messages.send)
recv = of_every_framework(messages.recv)
sendrecv = of_every_framework(messages.sendrecv)
