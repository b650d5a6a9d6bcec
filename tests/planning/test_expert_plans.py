"""Plans of large models of experts, from their configurations alone, checked by hand."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from jengine.capacity.planning.plan import make_plan
from jengine.core.config import EngineConfig
from jengine.table.program_table import TrunkKey
from tests.execution.specs import temporaries_bound

DATA = Path(__file__).parent.parent / "data"


def test_gpt_oss_120b_on_an_h200_by_hand() -> None:
    """Experts stay in four bits: a row of 2880 inputs is 23 tiles of 16 words, and 92 scales with those of
    padding.
    """
    plan = make_plan(EngineConfig(model=str(DATA / "gpt-oss-120b")), "h200", progress=False)
    row = 23 * 16 * 4 + 92 * 4
    experts = 128 * (2 * 2880 + 2880) * row + 128 * (2 * 2880 + 2880) * 2  # and biases of bfloat16
    attention = (64 + 2 * 8) * 64 * (2880 + 1) * 2 + (64 * 64 + 1) * 2880 * 2 + 64 * 4  # the last: sinks
    layer = experts + attention + 128 * (2880 + 1) * 2 + 2 * 2880 * 2  # a router and two norms
    assert plan.memory.weights == 36 * layer + 2 * 201088 * 2880 * 2 + 2880 * 2 == 77_590_887_552
    assert plan.memory.page == 64 * 18 * 2 * 8 * 64 * 2, (
        "a page holds 64 tokens of 18 layers: of half of them"
    )
    assert [group.window for group in plan.spec.groups] == [None, 128]
    assert plan.fits
    assert temporaries_bound(plan.spec, TrunkKey(8, 0)) < 128 * 2880 * 2880 // 8, (
        "experts are read as they lie"
    )


def test_deepseek_v3_on_eight_h200s_by_hand() -> None:
    """With quantization="fp8" each matrix has a byte per number and a float32 scale per row; the published
    blocks have a scale per 128 inputs of a row, and a vocabulary in bfloat16. Heads, experts and the
    vocabulary are sharded. The cached vectors and their weights are not.
    """
    config = EngineConfig(model=str(DATA / "deepseek-v3"), tensor_parallel_size=8, max_model_len=32768)
    published, plan = (
        make_plan(replace(config, quantization=quantization), "h200") for quantization in (None, "fp8")
    )

    def weights(scaled: int | None, vocabulary: int) -> int:
        """Bytes per device. `scaled` is the number of inputs per scale, None for all of a row's; `vocabulary`
        is the bytes of one of its two matrices.
        """

        def rows(count: int, inputs: int) -> int:
            return count * (inputs + 4 * (inputs // (scaled or inputs)))

        def gated(size: int) -> int:
            return rows(2 * size, 7168) + rows(7168, size)

        heads, expert = 128 // 8, 2048 // 8
        attention = (
            rows(1536, 7168) + rows(heads * 192, 1536) + rows(512 + 64, 7168) + rows(7168, heads * 128)
        )
        attention += heads * (128 + 128) * 512 * 2  # in bfloat16, since it is multiplied head by head
        attention += (1536 + 512 + 2 * 7168) * 2  # norms
        # routed and shared; router and its correction
        experts = 256 * gated(expert) + gated(expert) + 256 * 7168 * 2 + 256 * 4
        return 61 * attention + 3 * gated(18432 // 8) + 58 * experts + 2 * vocabulary + 7168 * 2

    assert plan.memory.weights == weights(None, 129280 // 8 * (7168 + 4)) == 85_476_961_792
    assert published.memory.weights == weights(128, 129280 // 8 * 7168 * 2) and published.fits
    assert plan.memory.page == 64 * 61 * (512 + 64) * 2, "each device has all of it"
    assert plan.roofline.formats.kv_bytes == 70_272 and plan.fits
    assert [(group.kind, len(group.layers)) for group in plan.spec.groups] == [("latent", 61)]
