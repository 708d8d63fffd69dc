"""Makes each ``print`` one write of whole lines.

With ``PYTHONUNBUFFERED``, which ``launch.run`` sets, a ``print`` of several values is several writes, and those of two
ranks mix.
"""

import sys

for stream in (sys.stdout, sys.stderr):
    if stream is not None:
        stream.reconfigure(write_through=False, line_buffering=True)
