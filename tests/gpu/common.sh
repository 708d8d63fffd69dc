# What run.sh and quarter_hour.sh share; both source it, with the interpreter in $python.

install() { # WHEELS: into a folder with the layout of an environment, where the core finds MPI's library
  local module
  prefix=$(mktemp -d)
  # A global variable, because it is read at the end.
  trap 'rm -rf "$prefix"' EXIT
  # Not --target, which skips a wheel's lib/ files, such as libmpi.so.12.
  "$python" -m pip install --quiet --disable-pip-version-check --no-index --no-deps --no-compile --ignore-installed \
    --prefix "$prefix" "$1"/*.whl || return 1
  module=$(find "$prefix" -name _dl_comm.abi3.so)
  MPIEXEC=$(find "$prefix" -path '*/bin/mpiexec')
  [ -n "$module" ] && [ -n "$MPIEXEC" ] || { echo "$1 lacks dl_comm or mpich" && return 1; }
  PYTHONPATH=$(dirname "$(dirname "$module")")${PYTHONPATH:+:$PYTHONPATH}
  # The core finds MPI itself; this prevents that another MPI on the machine is loaded first.
  LD_LIBRARY_PATH=$(dirname "$(find "$prefix" -name libmpi.so.12)")${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}
  PATH=$(dirname "$MPIEXEC"):$PATH
  export MPIEXEC PYTHONPATH LD_LIBRARY_PATH PATH
}

shm_folder() { # a tmpfs with a GiB; pages of files on a disk cannot be pinned for a GPU
  local folder
  for folder in /dev/shm "${XDG_RUNTIME_DIR:-}" "${TMPDIR:-/tmp}" /tmp /run; do
    if [ -n "$folder" ] && [ -w "$folder" ] && [ "$(df --output=fstype "$folder" 2>/dev/null | tail -1)" = tmpfs ] &&
      [ "$(df --output=avail -k "$folder" | tail -1)" -ge $((1 << 20)) ]; then
      echo "$folder"
      return
    fi
  done
}

shared_memory() { # sets the folder of the ranks' shared memory; containers often have 64 MB in /dev/shm
  local folder
  folder=$(shm_folder)
  if [ -z "$folder" ]; then
    echo "no tmpfs with a GiB; /dev/shm may be too small"
  elif [ "$folder" != /dev/shm ]; then
    export DL_COMM_SHM_DIR=$folder
  fi
}
