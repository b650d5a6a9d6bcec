"""Which `quantization` is fastest on a class of processors, and what it costs in quality."""

from __future__ import annotations

from jengine.execution.spec import ExecutionSpec, cpu_features

AVX512, AVX2 = "AVX-512 and bfloat16 products", "AVX2 only, the slower class of x86"
# by class: features that a processor has, and features that it does not have
CLASSES = {
    AVX512: ({"avx512_bf16", "avx512_vnni"}, {"amx_int8"}),
    AVX2: ({"avx2", "fma"}, {"avx512f", "avx_vnni"}),
}
USES = "for one stream", "for 32 at once", "in prompts"
# tokens/s over bfloat16's, of a model of 134 million parameters: benchmarks/results/compare_avx512_bf16.json;
# for AVX2, an estimate (benchmarks/NOTES.md)
SPEEDS = {
    AVX512: {"w8a8": (1.7, 1.5, 1.3), "w4a8": (2.8, 1.3, 1.3)},
    AVX2: {"w8a8": (1.5, 1.1, 1.4), "w4a8": (2.0, 0.9, 1.3)},
}
# over bfloat16's, of a model of 135 million: benchmarks/results/quantization_perplexity.json
PERPLEXITIES = {"w8a8": "1.01", "w4a8": "1.1 with calibration_data, 1.3 without"}


def fastest_formats(spec: ExecutionSpec) -> str:
    """One sentence for unquantized models on a CPU; empty for others, and if the class was not measured."""
    features = set(cpu_features().split())
    name = next(
        (name for name, (has, lacks) in CLASSES.items() if has <= features and not lacks & features), None
    )
    if spec.mesh.devices.flat[0].platform != "cpu" or spec.model.quantized or name is None:
        return ""
    uses = dict[str, list[str]]()
    for index, use in enumerate(USES):
        best = max(SPEEDS[name], key=lambda quantization: SPEEDS[name][quantization][index])
        uses.setdefault(best, []).append(
            f"about {SPEEDS[name][best][index]:g} times bfloat16's tokens/s {use}"
        )
    formats = (
        f"quantization={best!r} ({' and '.join(parts)}; perplexity times {PERPLEXITIES[best]})"
        for best, parts in uses.items()
    )
    return f"processor with {name}; fastest for small models: {', '.join(formats)}"
