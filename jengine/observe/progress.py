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
    return tqdm(iterable, disable=not (show and is_seen()), leave=False, **options)


def is_seen() -> bool:
    """Whether stderr is a terminal or a notebook's."""
    return sys.stderr.isatty() or _in_notebook()


def _in_notebook() -> bool:
    """Whether this is a notebook's process; others may have imported ipykernel too."""
    kernel: Any = sys.modules.get("ipykernel.kernelapp")
    return kernel is not None and bool(kernel.IPKernelApp.initialized())
