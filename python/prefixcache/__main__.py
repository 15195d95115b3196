"""``python -m prefixcache``: the ``prefixcache`` command, where it is not on the path."""

from __future__ import annotations

import sys

from prefixcache.cli import main as main

if __name__ == "__main__":
    sys.exit(main())
