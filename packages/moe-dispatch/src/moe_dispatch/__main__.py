"""``python -m moe_dispatch`` is ``moe-dispatch``."""

import sys

from moe_dispatch.cli import main

if __name__ == "__main__":
    sys.exit(main())
