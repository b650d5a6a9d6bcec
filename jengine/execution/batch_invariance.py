"""Where the bits of a row do not depend on the rows beside it, and where they might: what `batch_invariant` is refused with."""

from __future__ import annotations

from jengine.errors import InvalidArgument
from jengine.execution.spec import ExecutionSpec
from pallas_kernels.cpu.kinds import INPUTS
from pallas_kernels.products import cpu_refused

DETERMINISTIC: dict[str, str | bool] = {
    "xla_gpu_exclude_nondeterministic_ops": True
}  # XLA's compiler options: no sums by atomic operations


def check_batch_invariant(spec: ExecutionSpec, processes: int) -> None:
    """
    Raises:
        InvalidArgument: this model, these options or this device cannot keep it; says why.
    """
    reason = why_not_batch_invariant(spec, processes)
    if reason is not None:
        raise InvalidArgument("batch_invariant", True, reason)


def why_not_batch_invariant(spec: ExecutionSpec, processes: int) -> str | None:
    """Or None. Programs have one shape each, so all that may count is a row's place in one, and where a sum over devices begins."""
    model, devices = spec.model.config, spec.mesh.devices.size
    on_cpu = spec.mesh.devices.flat[0].platform == "cpu"
    if devices > 2 and (processes > 1 or not on_cpu):
        return f"tensor_parallel_size={devices}: at most 2, since the order of a sum over more depends on a row's place in it"
    if not on_cpu:
        experts = "of an expert's rows a product's kernel depends on how many there are"
        return f"{model.family} has experts: {experts}" if model.num_experts else None
    if cpu_refused() is not None:
        return f"{cpu_refused()}: XLA's own products may sum a row by its place"
    if model.latent is not None:
        return f"{model.family} has latent attention: XLA's own products of each head may sum a row by its place"
    dtype = str(spec.model.dtype)
    return None if dtype in INPUTS else f"dtype={dtype}: XLA's own products may sum a row by its place; others are for {', '.join(INPUTS)}"
