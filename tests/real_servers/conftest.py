"""Only with ``PENSTOCK_REAL_SERVERS=1``: the servers take minutes to install, and some to start."""

from __future__ import annotations

import os

collect_ignore_glob = [] if os.environ.get("PENSTOCK_REAL_SERVERS") == "1" else ["test_*.py"]
