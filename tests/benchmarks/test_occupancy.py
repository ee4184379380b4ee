"""How full replicas were: cases that can be counted by hand."""

import pytest

from benchmarks.common.occupancy import clip, occupancy, open_intervals


def test_a_replica_with_fewer_requests_than_lanes_is_a_bubble() -> None:
    first = [(0.0, 4.0), (0.0, 10.0), (1.0, 3.0)]  # 2 lanes: a third request waits in the engine
    second = [(0.0, 5.0), (2.0, 5.0)]
    full = occupancy([first, second], [(0.0, 10.0)], num_lanes=2)
    assert full.total == 20
    assert full.empty == 5
    # One lane of the first is free from 4 on; one of the second until 2, and both from 5 on.
    assert full.bubble == pytest.approx((6 / 2 + 2 / 2 + 5) / 20) and full.empty_share == 5 / 20


def test_only_the_windows_count() -> None:
    full = occupancy([[(0.0, 10.0)], []], [(2.0, 3.0), (8.0, 12.0)], num_lanes=1)
    assert full.total == 10
    assert full.empty == 5 + 2


def test_replicas_may_generate_while_all_gates_are_open() -> None:
    first = [(10.0, False), (14.0, True), (20.0, False)]
    second = [(11.0, False), (15.0, True), (20.0, False)]
    assert open_intervals([first, second], 0.0, 30.0) == [(0.0, 10.0), (15.0, 20.0)]
    assert open_intervals([first, second], 12.0, 17.0) == [(15.0, 17.0)]
    assert open_intervals([[], []], 1.0, 2.0) == [(1.0, 2.0)]


def test_clip() -> None:
    assert clip([(0.0, 2.0), (3.0, 5.0), (6.0, 7.0)], 1.0, 4.0) == [(1.0, 2.0), (3.0, 4.0)]
