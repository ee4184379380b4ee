"""A replica's counters in the process of its HTTP server, so that vLLM's `/metrics` includes them.

verl disables vLLM's own metrics unless `rollout.disable_log_stats=false`; these are always available. They are updated
at every weight update.
"""

from __future__ import annotations

from collections.abc import Mapping

from prometheus_client import Counter, Gauge

COUNTERS = {
    "tokens": "Tokens generated.",
    "answers": "Answers begun.",
    "busy_seconds": "Seconds with at least one request running.",
    "num_drafts": "Drafts verified.",
    "num_draft_tokens": "Draft tokens verified.",
    "num_accepted_tokens": "Draft tokens accepted.",
}
GAUGES = {
    "saved_seconds": "Estimated seconds that drafting saved in the latest step.",
    "history_tokens": "Tokens of history in this replica's engine.",
    "history_bytes": "Bytes of history in this replica's engine.",
    "history_store_tokens": "Tokens of history in the job's store.",
    "history_store_bytes": "Bytes of history in the job's store.",
}


class ReplicaMetrics:
    """The metrics `rhyme_...{replica="0"}`. Create one per process: a name can be registered only once."""

    def __init__(self, replica: int) -> None:
        label = str(replica)
        self._counters = {
            name: Counter(f"rhyme_{name.removeprefix('num_')}", text, ["replica"]).labels(label)
            for name, text in COUNTERS.items()
        }
        self._gauges = {name: Gauge(f"rhyme_{name}", text, ["replica"]).labels(label) for name, text in GAUGES.items()}

    def add(self, counts: Mapping[str, float]) -> None:
        """Add the replica's counts since the last call (`rollout_stats.RolloutStats.flush`)."""
        for name, counter in self._counters.items():
            counter.inc(max(counts.get(name, 0), 0))  # negative after an engine restart
        for name, gauge in self._gauges.items():
            if name in counts:
                gauge.set(counts[name])
