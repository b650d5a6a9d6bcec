"""Messages between the processes of an engine, with threads in place of processes."""

from __future__ import annotations

import queue
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from jengine.base.errors import EngineDead
from jengine.execution.executor import decode, encode
from jengine.execution.kinds import DeviceCall
from jengine.execution.kv_cache import COPIES
from jengine.execution.slots import UPDATE_WORDS
from jengine.parallel import link
from jengine.parallel.link import Follower, Leader, SingleProcess
from jengine.table.program_table import SamplerKey, ScoreKey, TrunkKey


@pytest.fixture
def words(monkeypatch: pytest.MonkeyPatch) -> queue.Queue[np.ndarray]:
    """Replaces JAX's broadcast of process 0's value: one copy for each process."""
    said: queue.Queue[np.ndarray] = queue.Queue()

    def broadcast(word: np.ndarray) -> np.ndarray:
        if word.any():
            for _ in range(3):
                said.put(word)
            return word
        return said.get(timeout=10)

    monkeypatch.setattr(link, "_broadcast", broadcast)
    return said


def connect(
    processes: int, words: queue.Queue[np.ndarray], stranger: bool = False
) -> tuple[Leader, list[Follower]]:
    with ThreadPoolExecutor() as pool:
        leader = pool.submit(Leader, "127.0.0.1", processes)
        if stranger:
            word = words.get(timeout=10).tobytes()
            with socket.create_connection(("127.0.0.1", int.from_bytes(word[link.TOKEN :], "big"))) as other:
                other.settimeout(10)
                other.sendall(
                    (link.TOKEN + 4).to_bytes(4, "big") + b"x" * link.TOKEN + (1).to_bytes(4, "big")
                )
                assert other.recv(1) == b""  # turned away
        followers = [pool.submit(Follower, "127.0.0.1", process) for process in range(1, processes)]
        return leader.result(10), [follower.result(10) for follower in followers]


def close(leader: Leader, followers: list[Follower]) -> None:
    leader.close()
    for follower in followers:
        assert follower.heard() == link.END
        follower._leader.close()


def test_they_agree_in_the_order_of_processes(words: queue.Queue[np.ndarray]) -> None:
    leader, followers = connect(3, words)
    with ThreadPoolExecutor() as pool:
        answers = [
            pool.submit(each.agree, value, list)
            for each, value in zip((leader, *followers), (5, 3, 4), strict=True)
        ]
        assert [answer.result(10) for answer in answers] == [[5, 3, 4]] * 3
    assert SingleProcess().agree(5, list) == [5]
    close(leader, followers)


def test_strangers_are_turned_away(words: queue.Queue[np.ndarray]) -> None:
    close(*connect(2, words, stranger=True))


def test_calls_arrive_as_they_were_made(words: queue.Queue[np.ndarray]) -> None:
    leader, followers = connect(2, words)
    calls = [
        DeviceCall(TrunkKey(8, 2, 4), np.arange(70_000, dtype=np.int32)),
        DeviceCall(SamplerKey(8, "full"), np.full((8, 3), 0xFFFFFFFF, np.uint32)),
        DeviceCall(SamplerKey(8, "greedy")),
        DeviceCall(ScoreKey(2), np.zeros(130, np.int32)),
        DeviceCall("update", np.arange(UPDATE_WORDS, dtype=np.int32)),
        DeviceCall("copy", np.arange(2 * COPIES, dtype=np.int32).reshape(2, COPIES)),
        DeviceCall("count", np.ones(515, np.int32)),
        DeviceCall("forget"),
    ]
    threading.Thread(target=lambda: [leader.broadcast(encode(call)) for call in calls]).start()
    for call in calls:
        heard = decode(followers[0].heard())
        assert heard.key == call.key
        if call.array is None:
            assert heard.array is None
        else:
            np.testing.assert_array_equal(heard.array, call.array, strict=True)
    close(leader, followers)


def test_reports_count_up_to_the_slowest(words: queue.Queue[np.ndarray]) -> None:
    leader, followers = connect(3, words)
    leader.watch()
    assert leader.reported() == 0 and SingleProcess().reported() is None
    followers[0].report(300)
    followers[1].report(2)
    followers[1].report(5)
    until = time.monotonic() + 10
    while leader.reported() != 5 and time.monotonic() < until:
        time.sleep(0.001)
    assert leader.reported() == 5
    close(leader, followers)


def test_a_process_that_ends_is_noticed(words: queue.Queue[np.ndarray]) -> None:
    leader, followers = connect(3, words)
    leader.watch()
    followers[1]._leader.close()
    with pytest.raises(EngineDead, match="process 2 of this engine has ended"):
        leader.wait(lambda: False)
    with pytest.raises(EngineDead, match="process 2"):
        leader.settle()
    for other in leader._others.values():
        other.shutdown(socket.SHUT_RDWR)
        other.close()
    with pytest.raises(EngineDead, match="process 0"):
        followers[0].heard()
    followers[0]._leader.close()


def test_one_that_ends_during_the_start(words: queue.Queue[np.ndarray]) -> None:
    leader, followers = connect(2, words)
    followers[0]._leader.close()
    with pytest.raises(EngineDead, match="process 1 of this engine ended during its start"):
        leader.agree(0, min)
    for other in leader._others.values():
        other.close()
