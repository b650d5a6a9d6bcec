"""Progress bars for terminals and notebooks. Log files get none."""

from __future__ import annotations

import sys
import warnings
from typing import Any

with warnings.catch_warnings():
    warnings.filterwarnings("ignore", "IProgress not found")  # Jupyter without ipywidgets: bars are text
    from tqdm.auto import tqdm


def progress_bar(iterable: Any = None, *, show: bool, **options: Any) -> Any:
    """A tqdm bar that is removed when it ends.

    Args:
        show: whether to show it, if stderr is a terminal or a notebook's.
        options: options of tqdm.
    """
    watched = sys.stderr.isatty() or "ipykernel" in sys.modules
    return tqdm(iterable, disable=not (show and watched), leave=False, **options)
