"""``python -m moe_train`` and the command ``moe-train``."""

import os
import sys

# libgomp reads this once, when torch loads it. Its threads otherwise spin while they wait, and on
# two cores that other programs use too a training step then takes ten times as long.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

from moe_train.cli import command


def main() -> None:
    """Run the command line and exit."""
    sys.exit(command(sys.argv[1:]))


if __name__ == "__main__":
    main()
