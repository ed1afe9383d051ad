"""What the gateway adds to a request; see ``gateway_measurement.py``, or ``python benchmarks/gateway.py --help``."""

from __future__ import annotations

import package_first  # noqa: F401 - this file bears the package's name
from gateway_measurement import main

if __name__ == "__main__":
    main()
