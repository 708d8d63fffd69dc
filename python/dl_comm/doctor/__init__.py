"""``python -m dl_comm.doctor`` checks an installation, without a launcher or under ``mpiexec``, and names the fixes.

One file for each subject; each returns a list of ``Check`` (``_checks.py``). Steps that may crash or hang (importing a
framework, loading a driver, starting MPI) run in separate processes (``_probes.py``). Only the command line is public;
docs/doctor.md describes it.
"""
