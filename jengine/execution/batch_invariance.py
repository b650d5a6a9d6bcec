"""Decides whether an engine can be batch-invariant: whether the bits of a row can depend on other rows."""

from __future__ import annotations

from jengine.base.errors import InvalidArgument
from jengine.execution.spec import ExecutionSpec
from pallas_kernels.devices import cpu_refused
from pallas_kernels.llvm.kinds import INPUTS

DETERMINISTIC: dict[str, str | bool] = {
    "xla_gpu_exclude_nondeterministic_ops": True
}  # XLA's compiler options: no sums with atomic operations


def check_batch_invariant(spec: ExecutionSpec) -> None:
    """Checks that `batch_invariant=True` is possible.

    Raises:
        InvalidArgument: this model, these options or this device do not allow it; the message gives the
            reason.
    """
    reason = why_not_batch_invariant(spec)
    if reason is not None:
        raise InvalidArgument("batch_invariant", True, reason)


def why_not_batch_invariant(spec: ExecutionSpec) -> str | None:
    """The reason, or None.

    Each program has one shape, and sums over devices have one order. So results can only depend on a row's
    place.
    """
    model, device = spec.model, spec.mesh.devices.flat[0]
    depends = model.batch_dependence(device)
    if device.platform != "cpu":
        return None if depends is None else f"{model.config.family} has {depends}"
    if cpu_refused() is not None:
        return f"{cpu_refused()}: XLA's own products may sum a row by its place"
    if depends is not None:
        return f"{model.config.family} has {depends}"
    dtype = str(spec.model.dtype)
    return (
        None
        if dtype in INPUTS
        else f"dtype={dtype}: XLA's own products may sum a row by its place; use one of {', '.join(INPUTS)}"
    )
