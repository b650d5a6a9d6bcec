"""The options of four-bit weights."""

from __future__ import annotations

from jengine.base.errors import InvalidArgument

FOUR_BITS = ("int4", "int4_mixed", "w4a8")  # values of the option quantization


def check_four_bits(quantization: str | None, group_size: int, calibration_data: object) -> None:
    """Raises InvalidArgument unless these options of EngineConfig fit together."""
    if group_size not in (32, 64, 128):
        raise InvalidArgument("quantization_group_size", group_size, "must be 32, 64 or 128")
    for name, value, default in (
        ("quantization_group_size", group_size, 128),
        ("calibration_data", calibration_data, None),
    ):
        if value != default and quantization not in FOUR_BITS:
            raise InvalidArgument(
                name, value, f"needs quantization={', '.join(FOUR_BITS[:-1])} or {FOUR_BITS[-1]}"
            )
