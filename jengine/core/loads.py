"""The load of several replicas as one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence as List
from functools import reduce
from itertools import zip_longest
from typing import Any

from jengine.core.updates import Load, StoreLoad

SAME = ("cache_groups", "page_size", "strategy", "loras", "programs")  # of all replicas
LEAST = ("first_token_seconds", "programs_ready")


def combined(loads: List[Load], ended: List[Load] = ()) -> Load:
    """Numbers are sums, but a new request goes to the replica with the soonest first token, and programs are
    those of each.

    Args:
        loads: of the replicas that run, at least one.
        ended: last loads of others, of which only counts since their start matter.
    """
    first, fields = loads[0], dict[str, Any]()
    for name in Load._fields:
        values = [getattr(load, name) for load in loads]
        if name in SAME:
            continue
        if name in LEAST:
            fields[name] = min((value for value in values if value is not None), default=None)
        elif name == "store":
            fields[name] = _stores(values)
        elif name == "decisions":
            fields[name] = tuple(sum((Counter(dict(value)) for value in values), Counter()).items())
        elif isinstance(values[0], tuple):
            fields[name] = tuple(map(sum, zip_longest(*values, fillvalue=0)))
        else:
            fields[name] = sum(values)
    return reduce(Load.after, ended, first._replace(**fields))


def _stores(loads: List[StoreLoad | None]) -> StoreLoad | None:
    known = [load for load in loads if load is not None]
    return reduce(StoreLoad.plus, known) if known else None
