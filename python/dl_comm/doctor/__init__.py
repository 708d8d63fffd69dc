"""``python -m dl_comm.doctor``: checks an installation, alone or under ``mpiexec``, and says what to do about it.

One file a subject: each gives a list of ``Check`` (``_checks.py``). What may crash or hang (importing a framework,
loading a driver, bringing MPI up alone) happens in a process of its own (``_probes.py``). Private but for the command
line, which docs/doctor.md shows.
"""
