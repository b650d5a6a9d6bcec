"""What the service, the commands and adapters to other projects import of the engine, beside the names for
users. Not for users: these names change without notice.

Names are imported on first use; `spi.pyi` lists them.
"""

from __future__ import annotations

from jengine.base.lazy_names import lazy_names

__all__, __getattr__, __dir__ = lazy_names(
    __name__, __file__, lambda name: AttributeError(f"{__name__} has no {name!r}")
)
