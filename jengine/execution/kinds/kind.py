"""What a kind of program is: its keys, how it is lowered, and how it is called.

All that handles programs (compiling, saving, running, warming up, planning) goes through kinds and knows none
of them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import wraps
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jengine.execution.batch import BatchLayout
from jengine.execution.device_state import DeviceState
from jengine.execution.loras import lora
from jengine.execution.spec import ExecutionSpec
from jengine.execution.trunk import Adapt
from jengine.models import Params
from jengine.scheduling.step_plan import StepPlan
from jengine.table.program_table import TableKey, TrunkKey
from jengine.table.ready_programs import ReadyPrograms

Key = TableKey | str  # str: the name of a kind with a single key


class DeviceCall(NamedTuple):
    """An operation on the devices, as plain data, so that other processes can repeat it.

    Attributes:
        key: of the program; its kind documents `array`.
        overtakes: of a trunk in a pipeline, see StepPlan.
    """

    key: Key
    array: np.ndarray | None = None
    overtakes: int = 0


class CallKind[K](ABC):
    """A kind of call. `name` names it between processes; `key` is the type of its keys, str if its only key
    is its name.

    Attributes:
        everywhere: whether all stages of a pipeline execute it, rather than the last one.
    """

    name: str
    key: ClassVar[type] = str
    everywhere: bool = True

    def run(self, state: DeviceState, key: K, array: Any) -> Any:
        """Executes a call without waiting for its result. Returns what the host reads later, if anything."""
        raise NotImplementedError


class Freeing(CallKind[str]):
    """Gives up what `free` frees."""

    def __init__(self, name: str, free: Callable[[DeviceState], None], *, everywhere: bool = True) -> None:
        self.name, self._free, self.everywhere = name, free, everywhere

    def run(self, state: DeviceState, key: str, array: None) -> None:
        self._free(state)


@dataclass(frozen=True, slots=True)
class Program:
    """A program before it is lowered.

    Attributes:
        name: shown in profiles.
        args: abstract arrays with shardings.
        out: partition specs of the results, as for `jax.shard_map`.
        donated: numbers of the arguments that it updates in place.
        by_shard: whether `function` computes one device's part, and exchanges data only where it says so.
    """

    name: str
    function: Callable[..., Any]
    args: tuple[Any, ...]
    out: Any
    donated: tuple[int, ...] = ()
    by_shard: bool = True


class Kind[K](CallKind[K]):
    """A kind of call that runs a program.

    Attributes:
        while_serving: whether programs of the kind run while the cache exists.
        joint: whether ranks run programs of the kind together. Each rank runs others by itself.
        uses_cache: whether others use the cache.
        each_step: whether steps call programs of the kind, with the weights first; see QuickCall.
    """

    while_serving: ClassVar[bool] = True
    each_step: ClassVar[bool] = False
    joint: ClassVar[bool] = False
    uses_cache: ClassVar[bool] = False

    def keys(self, spec: ExecutionSpec) -> Sequence[K]:
        """The keys that a table has."""
        every: Sequence[Any] = [self.name] if self.key is str else spec.table.all_keys()
        return [*filter(lambda key: isinstance(key, self.key), every)]

    @abstractmethod
    def program(self, spec: ExecutionSpec, key: K) -> Program:
        """The program of a key, from abstract values alone."""

    def calls(self, spec: ExecutionSpec, layout: BatchLayout, plan: StepPlan) -> Iterator[DeviceCall]:
        """The calls of this kind that a step makes before or after its trunk, if any."""
        return iter(())

    def examples(self, spec: ExecutionSpec, ready: ReadyPrograms) -> Mapping[K, StepPlan | DeviceCall]:
        """For each ready key, a step or call that runs its program and changes nothing that requests read."""
        return {}

    def heaviest(self, spec: ExecutionSpec) -> K | None:
        """The key that may need the most memory beside its arguments; None: others need more."""
        return None

    def temporaries(self, spec: ExecutionSpec, key: K) -> int:
        """Upper bound on the bytes of a program's temporaries on a device, for kinds with a heaviest key."""
        raise NotImplementedError

    def compile_effort(self, spec: ExecutionSpec, key: K) -> tuple[int, int]:
        """Programs that compare greater take longer to compile."""
        return 0, 0


class Allocation(Kind[str]):
    """Makes arrays of zeros.

    Args:
        arrays: the abstract ones of a spec, with shardings; None: it has none of these.
    """

    while_serving = False

    def __init__(self, name: str, arrays: Callable[[ExecutionSpec], Any], *, everywhere: bool = True) -> None:
        self.name, self._arrays, self.everywhere = name, arrays, everywhere

    def keys(self, spec: ExecutionSpec) -> Sequence[str]:
        return [] if self._arrays(spec) is None else [self.name]

    def program(self, spec: ExecutionSpec, key: str) -> Program:
        return allocation(key, self._arrays(spec))


def allocation(name: str, arrays: Any) -> Program:
    """The program of this key that makes arrays of zeros, from abstract ones with shardings."""

    def allocate() -> Any:
        return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), arrays)

    return Program(name.replace("-", "_"), allocate, (), partitions(arrays), by_shard=False)


def partitions(tree: Any) -> Any:
    """Partition specs of abstract arrays."""
    return jax.tree.map(lambda x: x.sharding.spec, tree)


def of_leaves(spec: ExecutionSpec, function: Callable[..., Any], *, both: bool = False) -> Callable[..., Any]:
    """A function of the leaves of its first argument, the parameters, which know the forms of products.

    Args:
        both: whether it takes a pair, of the draft model's parameters too, if there is one.
    """
    whole, drafting = _whole(spec), _whole(spec.drafting) if both and spec.drafting is not None else None
    count = len(spec.leaves)

    @wraps(function)
    def of(params: Sequence[jax.Array], *others: Any) -> Any:
        if drafting is None:
            return function(whole(params), *others)
        return function((whole(params[:count]), drafting(params[count:])), *others)

    return of


def lora_of(spec: ExecutionSpec, key: TrunkKey) -> Adapt | None:
    """What puts adapted weights in the place of a trunk's parameters; None: it has none."""
    if spec.adapters is None or not key.adapted:
        return None
    return lora(spec.adapters, spec.product_forms, key.adapted, logits=False)


def head_lora_of(spec: ExecutionSpec) -> Adapt | None:
    """What puts an adapted output head in the place of the model's; None: adapters cannot change it."""
    shapes = spec.adapters
    return None if shapes is None else lora(shapes, spec.product_forms, shapes.places, logits=True)


def _whole(spec: ExecutionSpec) -> Callable[[Sequence[jax.Array]], Params]:
    tree, model, forms = jax.tree.structure(spec.params), spec.model, spec.product_forms
    return lambda leaves: model.with_forms(jax.tree.unflatten(tree, leaves), forms)
