"""Plans of large models of experts, from their configurations alone, checked by hand."""

from __future__ import annotations

from pathlib import Path

from jengine.config import EngineConfig
from jengine.planning.plan import make_plan

DATA = Path(__file__).parent.parent / "data"


def test_gpt_oss_120b_on_an_h200_by_hand() -> None:
    """Experts stay in four bits: a row of 2880 inputs is 23 tiles of 16 words, and 92 scales with those of padding."""
    plan = make_plan(EngineConfig(model=str(DATA / "gpt-oss-120b")), "h200", progress=False)
    row = 23 * 16 * 4 + 92 * 4
    experts = 128 * (2 * 2880 + 2880) * row + 128 * (2 * 2880 + 2880) * 2  # and biases of bfloat16
    attention = (64 + 2 * 8) * 64 * (2880 + 1) * 2 + (64 * 64 + 1) * 2880 * 2 + 64 * 4  # the last: sinks
    layer = experts + attention + 128 * (2880 + 1) * 2 + 2 * 2880 * 2  # a router and two norms
    assert plan.memory.weights == 36 * layer + 2 * 201088 * 2880 * 2 + 2880 * 2 == 77_590_887_552
    assert plan.memory.page == 64 * 18 * 2 * 8 * 64 * 2, "a page holds 64 tokens of 18 layers: of half of them"
    assert [group.window for group in plan.spec.groups] == [None, 128]
    assert plan.fits
