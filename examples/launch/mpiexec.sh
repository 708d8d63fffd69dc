#!/bin/sh
# With the MPI that dl_comm was built with; dl-comm run finds its mpiexec. On several hosts: -H node1:2,node2:2
cd "$(dirname "$0")" || exit
exec "${PYTHON:-python}" -m dl_comm.run -n "${RANKS:-2}" train.py "$@"
