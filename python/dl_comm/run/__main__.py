"""``python -m dl_comm.run``."""

import sys

from dl_comm.run import main

if __name__ == "__main__":
    sys.exit(main())
