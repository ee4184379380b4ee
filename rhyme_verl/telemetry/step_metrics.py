"""rhyme's metrics of a training step, for the trackers of `trainer.logger`.

Replicas and the agent-loop manager report to one Ray actor per job. verl's trainer takes all metrics once per step,
right after the weight update that ends it (`integration.plugin`). A failure is logged once and the metrics are left
out: nothing here raises or waits longer than TIMEOUT_SECONDS. Imports neither verl nor vLLM.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

import ray
from ray.exceptions import RayError
from ray.util.metrics import Gauge
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from rhyme_verl.telemetry.logs import LogOnce
from rhyme_verl.telemetry.rollout_stats import is_state

logger = logging.getLogger(__name__)

PREFIX = "rhyme/"
ACTOR = "rhyme_metrics"
TIMEOUT_SECONDS = 10.0
CONNECTION_ERRORS = (RayError, OSError, RuntimeError, TimeoutError, asyncio.TimeoutError)


class StepMetrics:
    """The metrics reported since the last `take`."""

    def __init__(self) -> None:
        self._rollouts: dict[int, dict[str, float]] = {}  # by replica
        self._values: dict[str, float] = {}

    def add_rollout(self, replica: int, counts: Mapping[str, float]) -> None:
        """Add a replica's counts (`rollout_stats.RolloutStats.flush`); states replace earlier ones."""
        sums = self._rollouts.setdefault(replica, {})
        for name, value in counts.items():
            sums[name] = value if is_state(name) else sums.get(name, 0) + value

    def report(self, values: Mapping[str, float]) -> None:
        """Set finished metrics, by name without PREFIX. A later value replaces an earlier one."""
        self._values.update(values)

    def take(self) -> dict[str, float]:
        """Return all metrics by their full names, and reset them. Values that are not finite are left out."""
        metrics = {**summarize(list(self._rollouts.values())), **self._values}
        self._rollouts, self._values = {}, {}
        return {PREFIX + name: float(value) for name, value in metrics.items() if math.isfinite(value)}


def summarize(rollouts: list[dict[str, float]]) -> dict[str, float]:
    """Return the metrics of a step's rollout from the replicas' counts.

    Counts are summed over the replicas, and rates are quotients of these sums. Sizes of the replicas' own histories are
    averaged; all replicas report the same sizes of the store. A rate whose denominator is 0 is left out.
    """
    if not rollouts:
        return {}
    names = {name for rollout in rollouts for name in rollout}
    total = {name: sum(rollout.get(name, 0) for rollout in rollouts) for name in names}
    busy_seconds = max(rollout.get("busy_seconds", 0.0) for rollout in rollouts)
    metrics = {
        "rollout/tokens": total["tokens"],
        "rollout/answers": total["answers"],
        "rollout/busy_s": busy_seconds,
        "rollout/replicas": len(rollouts),
    }
    rates = {"rollout/tokens_per_s": (total["tokens"], busy_seconds)}
    if "num_draft_tokens" in names:
        drafting = sum("num_draft_tokens" in rollout for rollout in rollouts)
        drafted, accepted = total["num_draft_tokens"], total["num_accepted_tokens"]
        metrics |= {
            "spec/draft_tokens": drafted,
            "spec/accepted_tokens": accepted,
            "spec/time_saved_s": total["saved_seconds"],
            "spec/engines_off": total.get("drafting_off", 0),
            "history/replica_tokens": total["history_tokens"] / drafting,
            "history/replica_bytes": total["history_bytes"] / drafting,
        }
        rates |= {
            "spec/accepted_per_verify": (accepted, total["num_drafts"]),
            "spec/acceptance_rate": (accepted, drafted),
            "spec/accepted_share": (accepted, total.get("num_generated_tokens", 0)),
        }
    for name in ("tokens", "bytes", "evicted_tokens"):
        if f"history_store_{name}" in names:
            metrics[f"history/{name}"] = max(rollout.get(f"history_store_{name}", 0) for rollout in rollouts)
    return metrics | {name: part / whole for name, (part, whole) in rates.items() if whole > 0}


# One byte of memory, because Ray ignores the wanted node of an actor that needs nothing.
@ray.remote(num_cpus=0, memory=1, max_restarts=-1)
class MetricsActor(StepMetrics):
    """The job's StepMetrics, which shows each step's values as Ray metrics too (`rhyme_spec_acceptance_rate` ...)."""

    def __init__(self) -> None:
        super().__init__()
        self._gauges: dict[str, Gauge] = {}

    def take(self) -> dict[str, float]:
        metrics = super().take()
        for name, value in metrics.items():
            if name not in self._gauges:
                self._gauges[name] = Gauge(name.replace("/", "_"), description=f"{name} of the latest training step")
            self._gauges[name].set(value)
        return metrics


class MetricsReporter:
    """One process's access to the job's metrics. Works in any thread, with or without an event loop."""

    def __init__(self) -> None:
        self._actor: Any = None
        self._sent: Any = None  # the latest report
        self._log_once = LogOnce(logger)

    def start(self) -> None:
        """Start the job's actor without waiting. It takes longer than TIMEOUT_SECONDS on a busy machine."""
        with self._survive():
            self._connect()

    def report(self, values: Mapping[str, float]) -> None:
        """Send finished metrics (name without PREFIX -> value) without waiting; logged with this step or the next."""
        with self._survive():
            if self._sent is not None and ray.wait([self._sent], timeout=0)[0]:
                ray.get(self._sent)  # raises if the actor is lost; then this report goes to a new one
        with self._survive():
            self._sent = self._connect().report.remote(dict(values))

    async def add_rollout(self, replica: int, counts: Mapping[str, float]) -> None:
        """Send a replica's counts of a step. They have arrived when this returns, so the step's log includes them."""
        with self._survive():
            await asyncio.wait_for(self._connect().add_rollout.remote(replica, dict(counts)), TIMEOUT_SECONDS)

    def take(self) -> dict[str, float]:
        """Return the metrics of the step that ends now; empty if the job has never reported any."""
        with self._survive(), suppress(ValueError):  # no such actor
            if self._actor is None:
                self._actor = ray.get_actor(ACTOR)
            found: dict[str, float] = ray.get(self._actor.take.remote(), timeout=TIMEOUT_SECONDS)
            return found
        return {}

    def _connect(self) -> Any:
        """Return the job's MetricsActor. The first caller starts it, and it lives until that caller drops it.

        It is on the caller's node, without which the job would not go on either.
        """
        if self._actor is None:
            here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=True)
            self._actor = MetricsActor.options(  # type: ignore[attr-defined]
                name=ACTOR, get_if_exists=True, scheduling_strategy=here
            ).remote()
        return self._actor

    @contextmanager
    def _survive(self) -> Iterator[None]:
        """Log the first error of the connection, and connect anew after each."""
        try:
            yield
        except CONNECTION_ERRORS as error:
            self._actor = self._sent = None
            reason = str(error).partition("\n")[0] or type(error).__name__
            message = "rhyme's metrics of a step are missing; training continues without them: %s"
            self._log_once(logging.WARNING, message, reason)
