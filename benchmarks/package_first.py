"""Import this before ``gateway``: a script beside this file bears that name, and is not what is meant."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))
