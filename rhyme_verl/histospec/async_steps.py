"""Steps under vLLM's asynchronous scheduling: what was planned, and what will be sampled."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from rhyme_verl.histospec.device_buffers import HostTokens


@dataclass(eq=False)
class Plan:
    """What vLLM has scheduled for a step.

    Attributes:
        placeholders: number of draft tokens that were reserved, by request id.
        computed: tokens whose keys and values the scheduler counts as computed before the step, by id of a request that
            continues from the step before.
        num_rows: number of requests.
        other_tokens: tokens of requests that are being prefilled, except for one per request.
        draft_tokens: number of them in all.
    """

    placeholders: dict[str, int] = field(default_factory=dict)
    computed: dict[str, int] = field(default_factory=dict)
    num_rows: int = 0
    other_tokens: int = 0
    draft_tokens: int = 0

    @property
    def num_tokens(self) -> int:
        return self.num_rows + self.other_tokens + self.draft_tokens


@dataclass(eq=False)
class SampledStep:
    """A step whose tokens have been or will be sampled; `request_ids` by row."""

    plan: Plan
    request_ids: list[str]
    tokens: HostTokens


def without_placeholders(scheduler_output: Any) -> Plan:
    """Remove all placeholders from a step, in place, and return what remains."""
    scheduled, drafts = scheduler_output.num_scheduled_tokens, scheduler_output.scheduled_spec_decode_tokens
    placeholders = {request_id: len(tokens) for request_id, tokens in drafts.items()}
    for request_id, count in placeholders.items():
        scheduled[request_id] -= count
    drafts.clear()
    scheduler_output.total_num_scheduled_tokens -= sum(placeholders.values())
    running = scheduler_output.scheduled_cached_reqs
    computed = dict(zip(running.req_ids, running.num_computed_tokens, strict=True))
    for request_id in running.all_token_ids:  # it starts again, and tokens on their way may be dropped
        computed.pop(request_id, None)
    return Plan(placeholders, computed, len(scheduled), scheduler_output.total_num_scheduled_tokens - len(scheduled))


def rooms_of(plan: Plan, request_ids: list[str]) -> np.ndarray:
    """Return the maximum number of draft tokens by row; -1 for a request that does not continue in the step."""
    rooms = [plan.placeholders.get(one, 0) if one in plan.computed else -1 for one in request_ids]
    return np.array(rooms, np.int32)
