"""Progress bars, for people who watch: in a terminal or a notebook. A log file gets none."""

from __future__ import annotations

import sys
import warnings
from typing import Any

with warnings.catch_warnings():
    warnings.filterwarnings("ignore", "IProgress not found")  # Jupyter without ipywidgets: its bars are text then
    from tqdm.auto import tqdm


def progress_bar(iterable: Any = None, *, show: bool, **options: Any) -> Any:
    """A tqdm bar that is removed at its end.

    Args:
        show: False draws none; nor does True where stderr is neither a terminal nor a notebook's.
        options: tqdm's.
    """
    watched = sys.stderr.isatty() or "ipykernel" in sys.modules
    return tqdm(iterable, disable=not (show and watched), leave=False, **options)
