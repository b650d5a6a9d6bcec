"""Which trunks several ranks run together, and what does not work with several ranks."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any

import pytest

from jengine import EngineConfig, InvalidArgument
from jengine.engine.operations import GetPauseState, GetTrace, Operation, PauseState, WriteProfile
from jengine.engine.ranks import RankedEngine, agreed
from jengine.insight.profiling.data import ProfileOptions
from jengine.spi import start_engine
from jengine.table.program_table import ProgramTable, TrunkKey
from jengine.table.ready_programs import ReadyPrograms

TABLE = ProgramTable.build(max_num_seqs=32, max_num_batched_tokens=128, tile_size=32, page_buckets=(4, 16))
INVARIANT = ProgramTable.build_batch_invariant(max_num_seqs=16, tiles=2, tile_size=16)


@pytest.mark.parametrize("table", [TABLE, INVARIANT])
def test_every_step_runs_once_in_a_trunk_with_room_for_it(table: ProgramTable) -> None:
    ready = ReadyPrograms(table)
    for wanted in itertools.product([None, *ready.trunks()], repeat=2):
        steps = {rank: key for rank, key in enumerate(wanted) if key is not None}
        found = agreed(steps, ready)
        assert sorted(rank for _, ranks in found for rank in ranks) == sorted(steps)
        for key, ranks in found:
            assert key in ready.trunks()
            for rank in ranks:
                own = steps[rank]
                assert key.rows >= own.rows and key.tiles >= own.tiles and key.pages >= own.pages
                assert table.sample_rows(key) >= table.sample_rows(own)
        assert len(found) <= (1 if table is TABLE else 2)


def test_equal_steps_keep_their_trunk() -> None:
    ready = ReadyPrograms(TABLE)
    for key in ready.trunks():
        assert agreed({0: key, 3: key}, ready) == [(key, [0, 3])]
    assert agreed({}, ready) == []
    assert agreed({1: TrunkKey(4, 0, 4), 2: TrunkKey(8, 0, 16)}, ready)[0][0].rows >= 8


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"enable_expert_parallel": False}, "data_parallel_size=2: must be 1 without enable_expert_parallel"),
        ({"enable_lora": True}, "enable_lora=True: not with data_parallel_size=2"),
        ({"weight_updates": True}, "weight_updates=True: not with data_parallel_size=2"),
        ({"num_scheduler_steps": 8}, "num_scheduler_steps=8: not with data_parallel_size=2"),
        ({"record_trace": "trace"}, "record_trace='trace': not with data_parallel_size=2"),
        ({"programs": "folder"}, "programs='folder': not with data_parallel_size=2"),
        (
            {"num_processes": 2, "coordinator": "127.0.0.1:1"},
            "num_processes=2: not with data_parallel_size=2",
        ),
    ],
)
def test_what_ranks_cannot_have_is_refused(options: dict[str, Any], message: str) -> None:
    config = {"data_parallel_size": 2, "enable_expert_parallel": True, **options}
    with pytest.raises(InvalidArgument, match=message):
        start_engine(EngineConfig.of("demo", config), progress=False)


def test_a_model_without_experts_cannot_divide_them() -> None:
    with pytest.raises(
        InvalidArgument, match=r"enable_expert_parallel=True: must be False: .* has no experts"
    ):
        start_engine(EngineConfig.of("demo", {"enable_expert_parallel": True}), progress=False)


class _Rank:
    """Answers that it is paused, and notes what it was asked for."""

    limits = weights = on_host = costs = trace = None

    def __init__(self, *, idle: bool = True) -> None:
        self.state, self.operations = PauseState(True, idle, [], 0), list[Operation[Any]]()

    def do(self, operation: Operation[Any]) -> PauseState:
        self.operations.append(operation)
        return self.state


def ranked(*ranks: _Rank) -> RankedEngine:
    parts: Any = [*ranks], SimpleNamespace()
    return RankedEngine(*parts)


def test_a_process_is_profiled_once() -> None:
    ranks = [_Rank() for _ in range(3)]
    ranked(*ranks).do(GetTrace())
    ranked(*ranks).do(WriteProfile(ProfileOptions(), "folder", 1))
    assert [len(rank.operations) for rank in ranks] == [2, 1, 1]


@pytest.mark.parametrize("busy", [None, 0, 2])
def test_paused_ranks_are_idle_once_all_are(busy: int | None) -> None:
    ranks = [_Rank(idle=i != busy) for i in range(3)]
    assert ranked(*ranks).do(GetPauseState()).idle is (busy is None)
