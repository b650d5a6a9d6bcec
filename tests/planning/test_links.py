"""Seconds of collectives, calculated by hand for H200s: 450 GB/s in a host, 50 GB/s between hosts."""

from __future__ import annotations

import dataclasses

import pytest

from jengine.base.errors import InvalidArgument
from jengine.capacity.planning.layouts import deployments, refused
from jengine.capacity.planning.links import Cluster, Group
from jengine.devices.device_spec import device_spec
from jengine.parallel.layout import Layout

ONE, TWO = Cluster.of(device_spec("h200"), 8), Cluster.of(device_spec("h200"), 16)
SIZE = 9e6


def test_in_a_host() -> None:
    """A ring of 8: 7/8 of the bytes, twice for a sum, in 7 or 14 steps of 0.6 us after 6.6 us."""
    group = ONE.tensor_group(Layout(tensor=8))
    assert group == (8, 1)
    assert ONE.gather(SIZE, group) == pytest.approx((17.5e-6, 0, 10.8e-6))
    assert ONE.all_reduce(SIZE, group) == pytest.approx((35e-6, 0, 15e-6))
    assert ONE.send(SIZE, between_hosts=False) == pytest.approx((20e-6, 0, 7.2e-6))
    assert ONE.all_reduce(SIZE, Group(1, 1)) == ONE.gather(SIZE, Group(1, 1)) == (0, 0, 0)


PUBLISHED = [  # GPUs, bytes, microseconds of a sum
    ("h100", 4, 512 << 10, 10),  # vLLM's issue 24532
    ("h100", 4, 1 << 20, 14),
    ("h100", 8, 512 << 10, 11),  # 42324
    ("h100", 8, 1 << 20, 14),
    ("b200", 8, 16 << 10, 7),  # 37756, of a B300
    ("b200", 8, 128 << 10, 8),
]


@pytest.mark.parametrize(("device", "count", "size", "microseconds"), PUBLISHED)
def test_kernels_of_small_sums(device: str, count: int, size: int, microseconds: float) -> None:
    cluster, group = Cluster.of(device_spec(device), count), Group(count, 1)
    assert sum(cluster.all_reduce(size, group)) == pytest.approx(1e-6 * microseconds, rel=0.15)
    nccl = dataclasses.replace(cluster, kernels=False).all_reduce(size, group)
    assert nccl.latency == pytest.approx(6.6e-6 + 2 * (count - 1) * 0.6e-6)


def test_between_hosts() -> None:
    """Each of 8 devices of a host exchanges an eighth with its peer: half of 1.125 MB at 50 GB/s."""
    assert (TWO.hosts, TWO.per_host) == (2, 8)
    group = TWO.tensor_group(Layout(tensor=16))
    assert group == (16, 2)
    assert TWO.gather(SIZE, group) == pytest.approx((17.5e-6, 11.25e-6, 13.5e-6))
    assert TWO.all_reduce(SIZE, group) == pytest.approx((35e-6, 22.5e-6, 20.4e-6))
    assert TWO.send(SIZE, between_hosts=True) == pytest.approx((0, 180e-6, 9.3e-6))


def test_groups_of_a_layout() -> None:
    """Tensor is the innermost axis, stages the outermost."""
    assert TWO.data_group(Layout(data=16, expert_parallel=True)) == (16, 2)
    assert TWO.data_group(Layout(data=2, tensor=8, expert_parallel=True)) == (2, 2)
    assert TWO.data_group(Layout(data=2, tensor=4, expert_parallel=True)) == (2, 1)
    assert [TWO.borders(Layout(stages, 1, 16 // stages)) for stages in (1, 2, 4, 16)] == [0, 1, 1, 1]
    assert ONE.borders(Layout(stages=8)) == 0


def test_every_layout_of_eight_devices() -> None:
    dense = [*deployments(8, experts=False)]
    assert len({*dense}) == len(dense) == 10 and all(one.devices == 8 for one in dense)
    assert not any(one.layout.data > 1 or one.layout.expert_parallel for one in dense)
    assert str(dense[1]) == "tensor 2, 4 replicas" and str(dense[-1]) == "8 stages"
    routed = [*deployments(8, experts=True)]
    assert {*dense} < {*routed} and len({*routed}) == len(routed) == 26
    assert all(one.layout.expert_parallel for one in routed if one.layout.data > 1)


def test_layouts_that_cannot_be() -> None:
    def why(layout: Layout, per_host: int = 8) -> str | None:
        return refused(layout, experts=6, per_host=per_host)

    assert why(Layout(data=8, expert_parallel=True)) == "more devices than the model has experts, 6"
    assert (
        why(Layout(tensor=4), per_host=6)
        == "tensor 4 does not divide hosts of 6 devices, nor do they divide it"
    )
    assert why(Layout(stages=4, tensor=2)) is None


def test_devices_that_do_not_exist() -> None:
    with pytest.raises(InvalidArgument, match="hosts=3: must divide 16"):
        Cluster.of(device_spec("h200"), 16, 3)
    with pytest.raises(InvalidArgument, match="network=None: must be given: it is unknown for NVIDIA L4"):
        Cluster.of(device_spec("l4"), 16)
