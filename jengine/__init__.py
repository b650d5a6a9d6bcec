"""An LLM inference engine in which no request waits for a compilation.

Importing this package has no side effects beyond its names, and a finder that makes vLLM's modules from them
(jengine.vllm.modules). Names are imported on first use; `__init__.pyi` lists them.
"""

from __future__ import annotations

import sys

from jengine.base.lazy_names import lazy_names
from jengine.vllm.modules import VllmModules


def _missing(name: str) -> Exception:
    """An ImportError for names of vLLM, since `from jengine import ...` hides the message of an
    AttributeError.
    """
    from jengine.vllm.modules import OF_PACKAGE, missing

    text = missing(__name__, name, OF_PACKAGE)
    return ImportError(text, name=__name__) if name in OF_PACKAGE else AttributeError(text)


__all__, __getattr__, __dir__ = lazy_names(__name__, __file__, _missing)
if VllmModules not in sys.meta_path:
    sys.meta_path.append(VllmModules)
