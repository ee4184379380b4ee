"""Which settings gpu_check's measurements speak for. Pure: knows nothing of engines."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

STOCK = "stock"
ASYNC, SYNC = "async", "sync"
DEFAULT, PIECEWISE = "default", "piecewise"
NOISE = 0.02  # a smaller difference is none
COMMON_ACCEPTANCE = 1.5  # reported for history drafting on policies of 4 to 32B, from the second epoch on
GRAPHS_KEY = "engine_kwargs.vllm.compilation_config.cudagraph_mode"


@dataclass(frozen=True, kw_only=True)
class Point:
    """What was measured: so many requests with so many tokens of context, and planted acceptance per verification."""

    model: str
    rows: int
    context: int
    accepted: float


Speeds = Mapping[str, Mapping[Point, float]]  # tokens/s by name of an engine ("stock", or as `name` returns it)


@dataclass(frozen=True)
class Advice:
    setting: str  # below actor_rollout_ref.rollout
    value: str
    reason: str


def name(scheduling: str, graphs: str) -> str:
    """Return the name of an engine with HistoSpec."""
    return f"{scheduling} {graphs}"


def recommend(speeds: Speeds) -> list[Advice]:
    """Return a recommended value for each setting that was compared, and where drafting pays."""
    ours = [one for one in map(" ".join, itertools.product((ASYNC, SYNC), (DEFAULT, PIECEWISE))) if speeds.get(one)]
    if not ours:
        return []
    advice = []
    scheduling, graphs = ours[0].split()
    other = name(scheduling, PIECEWISE)
    if graphs == DEFAULT and other in ours:
        gain = gain_of(speeds, name(scheduling, DEFAULT), other)
        graphs = DEFAULT if gain >= 1.0 - NOISE else PIECEWISE
        value = "FULL_AND_PIECEWISE" if graphs == DEFAULT else "PIECEWISE"  # verl's default, from which rhyme chooses
        advice.append(Advice(GRAPHS_KEY, value, f"by default: {gain:.3f} x the speed of piecewise graphs only"))
    if scheduling == ASYNC and name(SYNC, graphs) in ours:
        gain = gain_of(speeds, name(ASYNC, graphs), name(SYNC, graphs))
        scheduling = ASYNC if gain >= 1.0 - NOISE else SYNC
        value = "auto" if scheduling == ASYNC else "off"
        advice.append(Advice("custom.rhyme.spec.async_scheduling", value, f"{gain:.3f} x the speed of synchronous"))
    best = name(scheduling, graphs)
    if speeds.get(STOCK):
        advice += _where_drafting_pays(speeds[STOCK], speeds[best])
    return advice


def gain_of(speeds: Speeds, one: str, other: str) -> float:
    """Return the geometric mean of one engine's speed relative to another's, over what both have measured."""
    logs = [math.log(speed / speeds[other][point]) for point, speed in speeds[one].items() if point in speeds[other]]
    return math.exp(sum(logs) / len(logs)) if logs else 1.0


def break_even(ratios: Sequence[tuple[float, float]]) -> float | None:
    """Return the acceptance from which drafting pays; None if it does not.

    Args:
        ratios: (accepted tokens per verification, speed relative to stock), ascending. Interpolated linearly.
    """
    for (less, below), (more, above) in itertools.pairwise([(0.0, -math.inf), *ratios]):
        if above >= 1.0 - NOISE:
            return more if math.isinf(below) else less + (more - less) * (1.0 - NOISE - below) / (above - below)
    return None


def _where_drafting_pays(stock: Mapping[Point, float], ours: Mapping[Point, float]) -> list[Advice]:
    """Return one advice per model: drafting stays on if it pays in some batch at an acceptance that is common."""
    advice = []
    for model in sorted({point.model for point in ours}):
        batches: dict[tuple[int, int], list[tuple[float, float]]] = {}
        for point in sorted(ours, key=lambda point: (point.context, point.rows, point.accepted)):
            plain = stock.get(replace(point, accepted=0.0))
            if point.model == model and plain:
                batches.setdefault((point.context, point.rows), []).append((point.accepted, ours[point] / plain))
        if not batches:
            continue
        least = {batch: break_even(ratios) for batch, ratios in batches.items()}
        pays = any(accepted is not None and accepted <= COMMON_ACCEPTANCE for accepted in least.values())
        words = [
            f"{rows} x {context:,} tokens: " + ("never" if accepted is None else f"from {accepted:.1f}")
            for (context, rows), accepted in least.items()
        ]
        undrafted = min(
            (ratio for ratios in batches.values() for accepted, ratio in ratios if accepted == 0.0), default=1
        )
        reason = (
            f"{model}: drafting pays, in accepted tokens per verification, at {'; '.join(words)}. Undrafted, it has "
            f"at worst {undrafted:.2f} x the speed of stock vLLM"
        )
        advice.append(Advice("custom.rhyme.spec.enabled", str(pays).lower(), reason))
    return advice
