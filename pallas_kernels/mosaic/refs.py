"""What the body of a GPU kernel is given: its references by name, and its form."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Refs[Inputs, Outputs, Scratch]:
    """A kernel's references, each group a NamedTuple.

    Attributes:
        inputs, outputs: in global memory.
        scratch: shared memory and barriers. Pallas places them in the order of the fields.
    """

    inputs: Inputs
    outputs: Outputs
    scratch: Scratch


def body[Inputs, Outputs, Scratch, Form](
    run: Callable[[Refs[Inputs, Outputs, Scratch], Form], None], outputs: Callable[..., Outputs], form: Form
) -> Callable[..., None]:
    """`run` as `plgpu.kernel` calls it, with one tree of inputs, and one of scratch memory:
    scratch_types=[Scratch(...)].

    Args:
        outputs: makes a group of the references to the outputs.
    """

    def called(inputs: Inputs, *refs: Any) -> None:
        *out, scratch = refs
        run(Refs(inputs, outputs(*out), scratch), form)

    return called
