"""``python -m moe_train`` and the command ``moe-train``."""

import os
import sys

# libgomp reads this once, when torch loads it. With `train.threads` above 1 its threads would spin
# for milliseconds between two small products; where other programs want the cores too, a step then
# takes several times as long. See docs/design/2026-11-30-threads.md.
os.environ.setdefault("GOMP_SPINCOUNT", "1000")


def main() -> None:
    """Run the command line and exit."""
    try:
        # Imported here: it takes seconds, in which a Ctrl-C is to be one line too.
        from moe_train.cli import command  # noqa: PLC0415

        code = command(sys.argv[1:])
    except KeyboardInterrupt:
        sys.stderr.write("moe-train: interrupted before it could save\n")
        code = 130
    sys.exit(code)


if __name__ == "__main__":
    main()
