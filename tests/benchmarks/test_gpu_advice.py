"""What the check of a GPU recommends, and the acceptance that it plants."""

import numpy as np
import pytest

from benchmarks.drafting.planted_drafter import ALLOWED_TOKEN, OTHER_TOKEN, PlantedDrafter
from benchmarks.engines.gpu_advice import Point, break_even, recommend


def speeds(**engines):
    """Speeds at (1, 64) rows and acceptance (0, 1, 2.5) by engine; "_" in its name stands for a space."""
    points = [
        Point(model="7b", rows=rows, context=64, accepted=accepted) for rows in (1, 64) for accepted in (0.0, 1.0, 2.5)
    ]
    kept = {name.replace("_", " "): dict(zip(points, values, strict=True)) for name, values in engines.items()}
    if "stock" in kept:
        kept["stock"] = {point: speed for point, speed in kept["stock"].items() if point.accepted == 0.0}
    return kept


STOCK = (100.0, 0, 0, 1000.0, 0, 0)
FAST = (100.0, 150.0, 250.0, 990.0, 1100.0, 1500.0)
SLOW = tuple(0.9 * speed for speed in FAST)
SLOWER = tuple(0.8 * speed for speed in FAST)


def settings(**engines):
    return {one.setting.rpartition(".")[2]: one.value for one in recommend(speeds(stock=STOCK, **engines))}


def test_the_fastest_graphs_and_scheduling_are_recommended():
    both = {"sync_default": SLOW, "sync_piecewise": SLOWER}
    assert settings(async_default=FAST, async_piecewise=SLOW, **both) == {
        "cudagraph_mode": "FULL_AND_PIECEWISE",
        "async_scheduling": "auto",
        "enabled": "true",
    }
    assert settings(async_default=SLOWER, async_piecewise=SLOW, sync_default=SLOWER, sync_piecewise=FAST) == {
        "cudagraph_mode": "PIECEWISE",
        "async_scheduling": "off",
        "enabled": "true",
    }


def test_what_was_not_measured_is_not_recommended():
    assert settings(async_piecewise=FAST) == {"enabled": "true"}
    assert "cudagraph_mode" not in settings(async_piecewise=FAST, sync_piecewise=SLOW)
    assert "async_scheduling" not in settings(sync_default=FAST, sync_piecewise=SLOW)
    without_stock = recommend(speeds(async_default=FAST, async_piecewise=SLOW))
    assert without_stock[0].value == "FULL_AND_PIECEWISE"
    assert recommend(speeds(stock=STOCK)) == []
    assert recommend({}) == []


def test_a_difference_within_noise_keeps_the_default():
    equal = tuple(1.01 * speed for speed in FAST)
    found = settings(async_default=FAST, async_piecewise=equal, sync_default=equal, sync_piecewise=equal)
    assert (found["cudagraph_mode"], found["async_scheduling"]) == ("FULL_AND_PIECEWISE", "auto")


def test_where_drafting_pays_is_told_per_batch():
    (advice,) = recommend(speeds(stock=STOCK, async_default=(95.0, 105.0, 150.0, 400.0, 500.0, 900.0)))
    assert advice.value == "true"
    assert "1 x 64 tokens: from 0.3; 64 x 64 tokens: never" in advice.reason
    assert "at worst 0.40 x" in advice.reason
    (advice,) = recommend(speeds(stock=STOCK, async_default=(60.0, 70.0, 110.0, 400.0, 500.0, 900.0)))
    assert advice.value == "false", "at an acceptance that is too rare"


def test_break_even_is_interpolated():
    assert break_even([(0.0, 1.0), (1.0, 1.5)]) == 0.0
    assert break_even([(0.0, 0.88), (1.0, 1.08)]) == pytest.approx(0.5)
    assert break_even([(0.0, 0.5), (1.0, 0.9)]) is None


class Core:
    """Stands for the compiled core; records its calls."""

    def __init__(self):
        self.calls = []

    def draft(self, *args, **kwargs):
        self.calls.append("draft")

    def draft_first(self, slots, sampled, rooms, expected, drafts, lengths, **others):
        self.calls.append("draft_first")
        lengths[:] = 3

    def consider(self, *args, **kwargs):
        self.calls.append("consider")
        return False

    def stats(self):
        return "stats"


def draft(planted, rows, room=1000, **limits):
    limits = {"max_step_tokens": 1 << 20, "max_sampled_rows": 0, **limits}
    lengths = np.full(rows, 100, np.int32)
    slots = np.arange(rows, dtype=np.int32)
    return planted.draft(None, lengths, slots, max_model_len=101 + room, now=0.0, **limits)


def test_planted_drafts_have_the_mean_in_one_row_and_in_many():
    for rows, steps in ((1, 64), (64, 1), (7, 64)):
        planted = PlantedDrafter(Core(), 1.0, 24)
        drafts = [one for _ in range(steps) for one in draft(planted, rows)]
        assert all(drafts)
        accepted = [one.count(ALLOWED_TOKEN) for one in drafts]
        assert np.mean(accepted) == pytest.approx(1.0, abs=0.1)
        assert all(one == sorted(one) and set(one) <= {ALLOWED_TOKEN, OTHER_TOKEN} for one in drafts)
        assert planted.num_accepted == sum(accepted)


def test_planted_drafts_keep_all_limits_and_the_core_works_as_usual():
    core = Core()
    planted = PlantedDrafter(core, 5.0, 24)
    assert max(map(len, draft(planted, 64, max_sampled_rows=256))) == 3
    assert max(map(len, draft(planted, 64, max_step_tokens=192))) == 2
    assert not any(draft(planted, 64, max_step_tokens=0))
    assert max(map(len, draft(planted, 64, room=1))) == 1
    drafts, lengths = np.zeros((4, 24), np.int32), np.zeros(4, np.int32)
    slots, rooms = np.array([0, 1, -1, 2], np.int32), np.array([24, 2, 24, -1], np.int32)
    limits = {"max_step_tokens": 1000, "max_sampled_rows": 0}
    planted.draft_first(slots, None, rooms, None, drafts, lengths, now=0.0, **limits)
    assert lengths[0] > 2 >= lengths[1] > 0
    assert list(lengths[2:]) == [0, 0]
    assert set(drafts[0, : lengths[0]]) <= {ALLOWED_TOKEN, OTHER_TOKEN}
    limits = {"max_step_tokens": 1000, "max_sampled_rows": 64, "num_rows": 32}  # most of them join in the step
    planted.draft_first(slots, None, rooms, None, drafts, lengths, now=0.0, **limits)
    assert max(lengths) == 1
    assert planted.consider() and not planted.wants_undrafted(4) and planted.stats() == "stats"
    assert core.calls == ["draft"] * 4 + ["draft_first"] * 2 + ["consider"]


def test_without_acceptance_nothing_is_drafted():
    planted = PlantedDrafter(Core(), 0.0, 24)
    assert draft(planted, 3) == [[], [], []]
    assert not planted.consider()
