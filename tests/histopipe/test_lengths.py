"""The length predictor: censoring, recency, shrinkage, calibration."""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rhyme_verl.histopipe.lengths import LengthPredictor, expected_lengths, rank_correlation
from rhyme_verl.histopipe.lengths_file import FILE, load_lengths, save_lengths
from rhyme_verl.telemetry.trace import read_trace

TRACE = Path(__file__).parents[2] / "benchmarks/traces/quickstart.parquet"


def observe(predictor, lengths_of, step=0, cap=float("inf")):
    """Let the predictor see {prompt key: lengths}, those that reach the cap cut off there."""
    keys = np.repeat(np.array(list(lengths_of), dtype=np.uint64), [len(values) for values in lengths_of.values()])
    lengths = np.concatenate([np.asarray(values, dtype=float) for values in lengths_of.values()])
    return predictor.observe(keys, np.minimum(lengths, cap), lengths >= cap, step)


def test_the_mean_is_kaplan_and_meiers():
    lengths = np.array([[4.0, 1.0, 2.0, 2.0]])
    censored = np.array([[False, False, True, False]])
    mean = expected_lengths(lengths, censored, np.ones((1, 4)))
    # Survival is 3/4 after 1, 1/2 after the 2 that ended, 0 after 4: the censored 2 counts as at least 2.
    assert mean[0] == pytest.approx(1.0 + 0.75 * 1.0 + 0.5 * 2.0)


def test_without_censoring_it_is_the_plain_mean():
    rng = np.random.default_rng(0)
    lengths = rng.integers(1, 1000, size=(5, 99)).astype(float)
    mean = expected_lengths(lengths, np.zeros_like(lengths, dtype=bool), np.ones_like(lengths))
    assert mean == pytest.approx(lengths.mean(axis=1))


def test_truncated_answers_are_not_taken_for_lengths():
    predictor = LengthPredictor(prior_answers=0.01)
    observe(predictor, {1: [100] * 4 + [400] * 12, 2: [100] * 4 + [400] * 12}, cap=400)
    observed = predictor.predict(np.array([1], dtype=np.uint64))
    assert observed[0] == pytest.approx(0.25 * 100 + 0.75 * 400, rel=1e-3)
    longer_cap = LengthPredictor(prior_answers=0.01)
    observe(longer_cap, {1: [100] * 4 + [300] * 4 + [200] * 8})
    half_censored = LengthPredictor(prior_answers=0.01)
    keys = np.full(16, 1, dtype=np.uint64)
    lengths = np.array([100] * 4 + [300] * 4 + [200] * 8)
    half_censored.observe(keys, lengths, lengths == 200, 0)
    key = np.array([1], dtype=np.uint64)
    assert half_censored.predict(key)[0] > longer_cap.predict(key)[0]


def test_prompts_never_seen_get_the_distribution_of_all():
    predictor = LengthPredictor(default_tokens=777)
    key = np.array([9999], dtype=np.uint64)
    assert predictor.predict(key).tolist() == [777]
    rng = np.random.default_rng(0)
    observe(predictor, {k: rng.lognormal(6.0, 0.5, 16) for k in range(1, 200)})
    assert predictor.predict(key)[0] == pytest.approx(np.exp(6.0 + 0.125), rel=0.1)


def test_a_prompt_seen_rarely_is_drawn_to_the_distribution_of_all():
    predictor = LengthPredictor(prior_answers=2.0)
    observe(predictor, {**{k: [1000] * 8 for k in range(1, 100)}, 500: [100], 501: [100] * 32})
    rare, known = predictor.predict(np.array([500, 501], dtype=np.uint64))
    assert 100 < known < 200 < rare < 1000


def test_newer_lengths_count_more():
    predictor = LengthPredictor(half_life_steps=1.0, prior_answers=0.01)
    observe(predictor, {1: [100] * 16}, step=0)
    observe(predictor, {1: [500] * 16}, step=8)
    assert predictor.predict(np.array([1], dtype=np.uint64))[0] == pytest.approx(500, rel=0.02)


def test_the_oldest_answers_of_a_prompt_give_way():
    predictor = LengthPredictor(answers_per_prompt=8, half_life_steps=1e9, prior_answers=1e-6)
    observe(predictor, {1: [100] * 8})
    observe(predictor, {1: [300] * 20}, step=1)
    assert predictor.predict(np.array([1], dtype=np.uint64))[0] == pytest.approx(300, rel=1e-3)


def test_the_correlation_is_of_the_predictions_made_before():
    rng = np.random.default_rng(1)
    predictor = LengthPredictor()
    medians = rng.lognormal(6, 1.0, 300)
    draw = lambda: {key: rng.lognormal(np.log(median), 0.3, 16) for key, median in enumerate(medians)}  # noqa: E731
    first = observe(predictor, draw(), step=0)
    assert np.isnan(first)
    observe(predictor, draw(), step=1)
    assert observe(predictor, draw(), step=2) > 0.9


@pytest.mark.parametrize("damage", [lambda data: data[: len(data) // 2], lambda data: b"", lambda data: b"other"])
def test_a_damaged_file_of_lengths_is_ignored(tmp_path, caplog, damage):
    predictor, key = LengthPredictor(), np.array([1], dtype=np.uint64)
    fresh = predictor.predict(key)
    observe(predictor, {1: [100] * 8})
    (tmp_path / "global_step_4").mkdir()
    save_lengths(tmp_path / "global_step_4", predictor.state())
    resumed = LengthPredictor()
    assert load_lengths(tmp_path / "global_step_4", resumed)
    assert resumed.predict(key)[0] == predictor.predict(key)[0] != fresh[0]
    file = tmp_path / "global_step_4" / FILE
    file.write_bytes(damage(file.read_bytes()))
    predictor = LengthPredictor()
    assert not load_lengths(tmp_path / "global_step_4", predictor)
    assert predictor.predict(key)[0] == fresh[0]
    assert "answer lengths are learnt from scratch" in caplog.text


def test_an_empty_step_changes_nothing():
    predictor = LengthPredictor()
    empty = np.zeros(0)
    assert np.isnan(predictor.observe(empty.astype(np.uint64), empty, empty.astype(bool), 3))
    assert predictor.predict(np.array([1], dtype=np.uint64))[0] == 1024.0


def test_lengths_of_a_recorded_run_are_predicted():
    table = read_trace(TRACE)
    step, key, length = (table.column(name).to_numpy() for name in ("step", "prompt_key", "length"))
    predictor = LengthPredictor()
    correlations = [
        predictor.observe(key[step == s], length[step == s], length[step == s] >= 400, int(s)) for s in np.unique(step)
    ]
    assert np.mean(correlations[8:]) > 0.95, "from the third epoch on"


@settings(max_examples=50, deadline=None)
@given(
    st.lists(
        st.tuples(st.integers(0, 5), st.integers(1, 400), st.integers(0, 3)),
        min_size=1,
        max_size=60,
    )
)
def test_predictions_lie_among_what_was_seen(answers):
    predictor = LengthPredictor(answers_per_prompt=4)
    for step in range(4):
        batch = [(key, length) for key, length, when in answers if when == step]
        keys, lengths = (np.array([one[i] for one in batch], dtype=t) for i, t in ((0, np.uint64), (1, float)))
        predictor.observe(keys, lengths, lengths >= 300, step)
    found = predictor.predict(np.arange(8, dtype=np.uint64))
    seen = [length for _, length, _ in answers]
    assert found.min() >= min(seen) * (1 - 1e-9) and found.max() <= max(seen) * (1 + 1e-9)


def test_rank_correlation_agrees_with_scipy():
    from scipy.stats import spearmanr

    rng = np.random.default_rng(0)
    left, right = rng.integers(0, 20, size=(2, 200))
    assert rank_correlation(left, right) == pytest.approx(spearmanr(left, right).statistic)
    assert np.isnan(rank_correlation(np.ones(5), np.arange(5)))
