"""`python -m minisgl` is the command line; without a command it is `minisgl serve`."""

from __future__ import annotations

import sys

from minisgl.cli import main

if __name__ == "__main__":
    sys.exit(main(default_command="serve"))
