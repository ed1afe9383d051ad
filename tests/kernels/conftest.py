from __future__ import annotations

import os

from worker.execution import threads

# Before anything imports torch: the settings under which a row's result depends on that row alone.
os.environ.update(threads.environment(None, os.environ))
