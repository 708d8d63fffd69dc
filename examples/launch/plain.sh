#!/bin/sh
# Without a launcher: each process gets its numbers. On several hosts, DL_COMM_ADDR names the host of rank 0, and all
# processes need the same secret, DL_COMM_JOB_KEY.
cd "$(dirname "$0")" || exit
export DL_COMM_SIZE="${RANKS:-2}" DL_COMM_ADDR="${DL_COMM_ADDR:-localhost:29500}"
rank=0 status=0
while [ "$rank" -lt "$DL_COMM_SIZE" ]; do
  DL_COMM_RANK=$rank "${PYTHON:-python}" train.py "$@" & pids="$pids $!"
  rank=$((rank + 1))
done
for pid in $pids; do wait "$pid" || status=$?; done
exit "$status"
