"""Python imports this as it starts, where `jengine profile -- COMMAND` has put its folder on the path."""

import os
import sys

_HERE = os.path.dirname(os.path.abspath(__file__))


def _run_others() -> None:
    """The sitecustomize that there would be without this one."""
    import importlib.util
    from importlib.machinery import PathFinder

    found = PathFinder.find_spec(
        "sitecustomize", [path for path in sys.path if os.path.abspath(path or ".") != _HERE]
    )
    if found is not None and found.loader is not None:
        found.loader.exec_module(importlib.util.module_from_spec(found))


_run_others()
if "_JENGINE_PROFILE" in os.environ:
    try:
        from jengine.insight.profiling.command import begin

        begin(os.environ["_JENGINE_PROFILE"])
    except Exception as error:  # the command goes on without a profile
        print(f"jengine profile: {sys.executable} is not profiled: {error}", file=sys.stderr)
