"""Has a program run by the server of ``tests/imported.py``, and ends as it ends: ``client.py SOCKET ARGUMENT...``."""

from __future__ import annotations

import json
import os
import resource
import signal
import socket
import sys
from contextlib import suppress

server = socket.socket(socket.AF_UNIX)
server.connect(sys.argv[1])
# The three standard files, and what a launcher has given to this process for its rank.
files = []
for name in os.listdir("/proc/self/fd"):
    with suppress(OSError):  # the list itself was a file
        if os.get_inheritable(int(name)):
            files.append(int(name))
request = {"arguments": sys.argv[2:], "environment": dict(os.environ), "folder": os.getcwd(), "files": files}
text = json.dumps(request).encode()
socket.send_fds(server, [len(text).to_bytes(4, "little")], files)
server.sendall(text)
for number in (signal.SIGINT, signal.SIGTERM):
    signal.signal(number, lambda number, _: server.send(bytes([number])))
# The files stay open here: a launcher sees the end of its connection and that of its child at one time.
status = server.recv(4)
code = os.waitstatus_to_exitcode(int.from_bytes(status, "little")) if status else 255
if code >= 0:
    os._exit(code)
resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
with suppress(OSError):
    signal.signal(-code, signal.SIG_DFL)
os.kill(os.getpid(), -code)
