"""Replays recorded answers through a drafter, step by step, as an engine would have run them.

The recorded answer takes the role of the policy. In every engine step, each running request's draft is compared with
the answer's next tokens; the longest common prefix counts as accepted, and one more token follows. For answers sampled
at temperature 1.0 this reproduces vLLM's sampler for drafters that propose single tokens without probabilities: the
sampler accepts a token exactly if it is the one that it draws from the model, so an answer's tokens do not depend on
the drafts. The replay ignores that another random state would give other answers, which the size of the trace averages
out. It also ignores the cost of prefill: a request's first token comes with its admission at the cost of one row. A
modelled engine step takes its published time, and before it the accelerator waits for the host: for the drafter, as
measured, and for the rest of the host's work, from a table (host_gap.py).

Like in vLLM's model runner, the rows of a batch have no gaps: a waiting request takes a finished request's row, or else
the last row moves there. A drafter also sees the rows that have just finished; their drafts are dropped. This module
depends on no drafter.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from benchmarks.drafting.host_gap import HostGap

TRACES = Path(__file__).parents[1] / "traces"


@dataclass(frozen=True, kw_only=True)
class Answer:
    """One recorded answer."""

    prompt_key: int
    sample: int
    prompt: np.ndarray  # int32 [prompt_tokens]
    tokens: np.ndarray  # int32 [answer_tokens], including the end-of-text token
    reward: float  # NaN if unknown
    greedy: np.ndarray | None = None  # bool [answer_tokens]: whether it was the policy's most probable token


@dataclass(frozen=True, kw_only=True)
class TraceStep:
    """The answers of one training step, which run together and become history together."""

    step: int
    epoch: int  # pass over the prompts, from 1
    answers: list[Answer]


@dataclass(eq=False)
class Request:
    """A running answer."""

    request_id: str
    answer: Answer
    num_first_tokens: int = 1  # come with its admission; above 1 it resumes in the middle of its answer
    position: int = 0  # number of answer tokens so far
    draft: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.tokens: list[int] = self.answer.tokens.tolist()

    @property
    def is_finished(self) -> bool:
        return self.position == len(self.tokens)


class Batch:
    """The running requests with the fields of vLLM's `InputBatch` that drafters read."""

    def __init__(self, max_rows: int, width: int) -> None:
        self.token_ids_cpu = np.zeros((max_rows, width), dtype=np.int32)
        self.num_tokens_no_spec = np.zeros(max_rows, dtype=np.int32)
        self.num_prompt_tokens = np.zeros(max_rows, dtype=np.int32)
        self.requests: list[Request] = []  # by row; only for clairvoyant drafters
        self.req_ids: list[str] = []
        self.req_id_to_index: dict[str, int] = {}

    def put(self, row: int, request: Request) -> None:
        """Start `request` in `row`, which is one past the last or that of a finished request."""
        if row == len(self.requests):
            self.requests.append(request)
            self.req_ids.append(request.request_id)
        else:
            del self.req_id_to_index[self.req_ids[row]]
            self.requests[row] = request
            self.req_ids[row] = request.request_id
        self.req_id_to_index[request.request_id] = row
        prompt = request.answer.prompt
        self.token_ids_cpu[row, : len(prompt)] = prompt
        self.num_tokens_no_spec[row] = self.num_prompt_tokens[row] = len(prompt)

    def drop(self, row: int) -> None:
        """Remove `row` and move the last row there."""
        last = len(self.requests) - 1
        del self.req_id_to_index[self.req_ids[row]]
        if row != last:
            count = self.num_tokens_no_spec[last]
            self.token_ids_cpu[row, :count] = self.token_ids_cpu[last, :count]
            self.num_tokens_no_spec[row] = count
            self.num_prompt_tokens[row] = self.num_prompt_tokens[last]
            self.requests[row], self.req_ids[row] = self.requests[last], self.req_ids[last]
            self.req_id_to_index[self.req_ids[row]] = row
        self.requests.pop()
        self.req_ids.pop()

    def append(self, row: int, tokens: list[int]) -> None:
        count = int(self.num_tokens_no_spec[row])
        self.token_ids_cpu[row, count : count + len(tokens)] = tokens
        self.num_tokens_no_spec[row] = count + len(tokens)


class Drafter(Protocol):
    """The interface of a drafter. One object sees a whole trace, in order."""

    def propose(self, batch: Batch, sampled: list[list[int]], now: float) -> list[list[int]]:
        """Return a draft for each row of `batch`; `sampled` has each row's newest tokens, which `batch` contains, too.

        `now` is in seconds: the modelled time if steps have modelled costs, otherwise a monotonic clock.
        """
        ...

    def finish_step(self, step: TraceStep) -> None:
        """Add the step's answers to the history."""
        ...


class StepSeconds(Protocol):
    """Returns the seconds of an engine step without prefill."""

    def __call__(
        self, rows: int, num_tokens: int, context: float, drafted: int | None = None, longest: int | None = None
    ) -> float:
        """Return the seconds of a step.

        Args:
            num_tokens: one per row plus all draft tokens.
            context: mean context tokens per row.
            drafted: draft tokens; by default all tokens but one per row.
            longest: tokens of the longest draft; by default all drafts are equally long.
        """
        ...


@dataclass
class Totals:
    """Sums over engine steps. A verify is one step of one request after its first token, drafted or not."""

    requests: int = 0
    tokens: int = 0
    prefilled: int = 0  # tokens that came with a request's admission
    verifies: int = 0
    drafts: int = 0  # of at least one token
    drafted: int = 0
    accepted: int = 0
    engine_steps: int = 0
    model_seconds: float = 0.0  # modelled engine steps on the accelerator
    host_seconds: float = 0.0  # in which the accelerator waits for the host, including the drafter
    draft_seconds: float = 0.0  # measured calls of propose()
    finish_seconds: float = 0.0  # measured calls of finish_step()

    def __add__(self, other: Totals) -> Totals:
        return Totals(*(getattr(self, f.name) + getattr(other, f.name) for f in fields(self)))

    def summary(self) -> dict[str, float]:
        """Return the rates that are compared and the counts behind them."""
        seconds = self.model_seconds + self.host_seconds
        return {
            "accepted_per_verify": self.accepted / self.verifies,
            "tokens_per_step": (self.tokens - self.prefilled) / self.verifies,
            "acceptance_rate": self.accepted / self.drafted if self.drafted else 0.0,
            "proposed_per_accepted": self.drafted / self.accepted if self.accepted else float("inf"),
            "drafted": self.drafted,
            "accepted": self.accepted,
            "verifies": self.verifies,
            "tokens": self.tokens,
            "draft_us_per_verify": 1e6 * self.draft_seconds / self.verifies,
            "modelled_tokens_per_s": self.tokens / seconds if self.model_seconds else 0.0,
            "device_tokens_per_s": self.tokens / self.model_seconds if self.model_seconds else 0.0,
            "host_share": self.host_seconds / seconds if self.model_seconds else 0.0,
            "drafter_share": self.draft_seconds / seconds if self.model_seconds else 0.0,
        }


class Replay:
    """An engine with `concurrency` rows that replays recorded answers with a drafter."""

    def __init__(
        self,
        drafter: Drafter,
        concurrency: int,
        width: int,
        step_cost: StepSeconds | None = None,
        *,
        charge_drafter: bool = True,
        host_gap: HostGap | None = None,
    ) -> None:
        """Create an engine without requests.

        Args:
            width: tokens per row for the longest prompt and answer plus a draft (see `width_of`).
            charge_drafter: whether the drafter's measured time advances the modelled clock. If the host gap is that of
                asynchronous scheduling, only the time of calls that draft does, because no step waits for the others.
            host_gap: the host's work besides the drafter's; None: none.
        """
        self._charge_drafter = charge_drafter
        self._host_gap = host_gap
        self._drafter = drafter
        self._concurrency = concurrency
        self._step_cost = step_cost
        self._clock = 0.0
        self.batch = Batch(concurrency, width)
        self.totals = Totals()

    def run_step(self, step: TraceStep) -> Totals:
        """Replay one training step, give its answers to the drafter as history, and return the totals of the step."""
        self.totals = Totals()
        waiting = deque(
            Request(f"{step.step}-{answer.prompt_key:x}-{answer.sample}", answer) for answer in step.answers
        )
        self.admit(waiting)
        while self.batch.requests:
            self.engine_step()
            self.admit(waiting)
        started = time.perf_counter()
        self._drafter.finish_step(step)
        self.totals.finish_seconds = time.perf_counter() - started
        return self.totals

    def admit(self, waiting: deque[Request]) -> None:
        """Give the rows of finished requests to waiting ones or drop them, then fill free rows."""
        for row in range(len(self.batch.requests) - 1, -1, -1):
            if self.batch.requests[row].is_finished:
                if waiting:
                    self.batch.put(row, waiting.popleft())
                else:
                    self.batch.drop(row)
        while waiting and len(self.batch.requests) < self._concurrency:
            self.batch.put(len(self.batch.requests), waiting.popleft())

    def engine_step(self) -> None:
        """Run one engine step: verify all drafts, then ask for new ones."""
        totals, requests = self.totals, self.batch.requests
        rows = len(requests)
        context_tokens = int(self.batch.num_tokens_no_spec[:rows].sum())
        sampled = []
        drafted = longest = 0
        for row, request in enumerate(requests):
            drafted += len(request.draft)
            longest = max(longest, len(request.draft))
            tokens = self._verify(request)
            self.batch.append(row, tokens)
            sampled.append(tokens)
        if self._step_cost is not None:
            if self._host_gap is not None:
                self._charge_host(self._host_gap.seconds(rows, rows + drafted))
            seconds = self._step_cost(rows, rows + drafted, context_tokens / rows, drafted, longest)
            totals.model_seconds += seconds
            self._clock += seconds
        started = time.perf_counter()
        drafts = self._drafter.propose(self.batch, sampled, started if self._step_cost is None else self._clock)
        spent = time.perf_counter() - started
        totals.draft_seconds += spent
        totals.engine_steps += 1
        hides_work = self._host_gap is not None and self._host_gap.is_asynchronous
        if self._charge_drafter and (any(drafts) or not hides_work):
            self._charge_host(spent)
        for request, draft in zip(requests, drafts, strict=True):
            request.draft = draft

    def _charge_host(self, seconds: float) -> None:
        self.totals.host_seconds += seconds
        self._clock += seconds

    def _verify(self, request: Request) -> list[int]:
        """Return the tokens that the request gets in this step: the accepted ones and one more."""
        totals, start, draft = self.totals, request.position, request.draft
        if start == 0:
            totals.requests += 1
            request.position = min(request.num_first_tokens, len(request.tokens))
            totals.prefilled += request.position
        else:
            accepted = 0
            most = min(len(draft), len(request.tokens) - start)
            while accepted < most and draft[accepted] == request.tokens[start + accepted]:
                accepted += 1
            totals.verifies += 1
            totals.drafts += bool(draft)
            totals.drafted += len(draft)
            totals.accepted += accepted
            request.position = min(start + accepted + 1, len(request.tokens))
        totals.tokens += request.position - start
        return request.tokens[start : request.position]


def replay(
    steps: Sequence[TraceStep], drafter: Drafter, concurrency: int, step_cost: StepSeconds | None = None
) -> dict[int, Totals]:
    """Replay a whole trace and return the totals by epoch."""
    engine = Replay(drafter, concurrency, width_of(steps), step_cost)
    by_epoch: dict[int, Totals] = {}
    for step in steps:
        by_epoch[step.epoch] = by_epoch.get(step.epoch, Totals()) + engine.run_step(step)
    return by_epoch


def width_of(steps: Iterable[TraceStep], room: int = 128) -> int:
    """Return the tokens a row needs: the longest prompt and answer plus `room`, so that no draft is cut short."""
    return max(len(answer.prompt) + len(answer.tokens) for step in steps for answer in step.answers) + room


def named_traces(paths: Sequence[Path]) -> dict[str, Path]:
    """Return paths of traces by their names in results. Without `paths`, the traces of the repository are used.

    Raises:
        ValueError: two traces have the same name, or there is no trace.
    """
    found: dict[str, Path] = {}
    for path in paths or sorted(TRACES.glob("*.parquet")):
        if path.stem in found:
            raise ValueError(f"{path}: named like {found[path.stem]}, but results are stored by name")
        found[path.stem] = path
    if not found:
        raise ValueError(f"{TRACES}: contains no traces")
    return found


def load_trace(path: Path, max_epoch: int | None = None) -> list[TraceStep]:
    """Read a recorded trace (`rhyme_verl.telemetry.trace`) without its validation rollouts.

    Args:
        path: a Parquet file or a folder of them.
        max_epoch: last epoch to read; None: all.

    Raises:
        ValueError: the trace is missing or malformed, or has no such rollouts.
    """
    from rhyme_verl.telemetry.trace import read_trace

    steps: dict[tuple[int, int], list[Answer]] = {}
    for row in read_trace(path).to_pylist():
        if not row["validate"] and row["tokens"] and (max_epoch is None or row["epoch"] <= max_epoch):
            steps.setdefault((row["step"], row["epoch"]), []).append(_answer(row))
    if not steps:
        raise ValueError(f"{path}: no rollouts for training" + (f" up to epoch {max_epoch}" if max_epoch else ""))
    return [TraceStep(step=step, epoch=epoch, answers=steps[step, epoch]) for step, epoch in sorted(steps)]


def _answer(row: dict[str, Any]) -> Answer:
    return Answer(
        prompt_key=row["prompt_key"],
        sample=row["sample"],
        prompt=np.array(row["prompt"], np.int32),
        tokens=np.array(row["tokens"], np.int32),
        reward=float("nan") if row["reward"] is None else row["reward"],
        greedy=None if row["greedy"] is None else np.array(row["greedy"], bool),
    )
