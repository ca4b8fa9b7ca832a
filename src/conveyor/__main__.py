"""``python -m conveyor``: the command of ``conveyor.command``."""

from __future__ import annotations

import sys

from conveyor.command import main

if __name__ == "__main__":
    sys.exit(main())
