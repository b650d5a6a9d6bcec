"""What all tests share."""

from __future__ import annotations

import os
from pathlib import Path

from hypothesis import settings

# One folder of compiled programs for the whole run and the next ones. Set before anything imports jengine,
# and inherited by the processes that tests start.
os.environ.setdefault("JENGINE_CACHE_DIR", str(Path(__file__).parent.parent / ".cache" / "jengine"))

# Two busy cores make any deadline flaky; a run that fails must fail again.
settings.register_profile("jengine", deadline=None, derandomize=True)
settings.load_profile("jengine")
