"""verl's load balancer, replaced: an actor that runs the `Scheduler` for all agent-loop workers.

Requests that belong to no known answer go to the replica with the fewest, as in verl's own balancer. Known answers
never ask: their workers hear which replica they run on (`rhyme_verl.histopipe.messages`). Knows verl's protocol of a
load balancer (`verl.workers.rollout.router.RequestLoadBalancer`) and nothing else of verl.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import math
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

import ray
from ray.exceptions import RayActorError

from rhyme_verl.histopipe.choice import Choice, choose_shape
from rhyme_verl.histopipe.lengths_file import latest_step, load_lengths, save_lengths
from rhyme_verl.histopipe.messages import (
    Finished,
    Follows,
    Group,
    GroupEnded,
    GroupVisible,
    Lane,
    News,
    Report,
    Started,
    Stopped,
)
from rhyme_verl.histopipe.schedule_log import ScheduleLog
from rhyme_verl.histopipe.scheduler import Job, Scheduler, UnitReport
from rhyme_verl.request_id import AnswerId
from rhyme_verl.telemetry import logs

logger = logging.getLogger(__name__)

MAX_CALLS = 4096  # at a time: each worker listens with one
TICK_SECONDS = 0.5
NEWS_SECONDS = 0.01  # that news is collected for
OWNER_DIED = "owner has died"  # in Ray's words: the end of a job
VISIBLE_SECONDS = 5.0  # within which verl's replay buffer has what a worker was told to publish


class GroupTable(Protocol):
    """verl's table of groups, as far as the router uses it."""

    def count_available(self) -> int:
        """Return how many training groups are finished and not taken by the trainer."""

    def mark_failed(self, uids: Sequence[str]) -> None:
        """Tell the trainer that these groups will never finish."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class RouterSettings:
    """What the router has to know of the job.

    Attributes:
        job: for the scheduler.
        warmup_batches: that the trainer submits ahead.
        samples: answers per group.
        log_folder: for the schedule, or None.
        checkpoints: verl's folder of checkpoints, in which lengths are saved too, or None.
        resume_from: checkpoint folder whose lengths are loaded, or None.
    """

    job: Job
    warmup_batches: float = 0.0
    samples: int = 1
    log_folder: str | None = None
    checkpoints: str | None = None
    resume_from: str | None = None


class _Worker:
    """A worker's news, and the replicas whose handles it has."""

    def __init__(self) -> None:
        self.known: set[str] = set()
        self._news = News()
        self._is_new = asyncio.Event()

    def change(self) -> News:
        """Return the news to add to."""
        self._is_new.set()
        return self._news

    async def listen(self) -> News:
        await self._is_new.wait()
        await asyncio.sleep(NEWS_SECONDS)
        self._is_new.clear()
        news, self._news = self._news, News()
        return news


@dataclasses.dataclass(slots=True, eq=False)
class _Followed:
    """A group: who follows it, and what its worker missed before it followed."""

    is_validation: bool
    worker: str | None = None
    missed: list[Lane] = dataclasses.field(default_factory=list)


class Router:
    """The router's work, in one event loop; `HistoPipeRouter` is the actor."""

    def __init__(self, servers: dict[str, Any], config: dict[str, Any] | None = None) -> None:
        self._handles = dict(servers)
        self._scheduler = Scheduler(Job(batch_size=1, max_running=1 << 20, max_tokens=1), self)
        self._scheduler.lanes.add_replicas(servers, time.monotonic())
        self._settings = RouterSettings(job=self._scheduler.job)
        self._table: GroupTable | None = None
        self._workers: dict[str, _Worker] = {}
        self._groups: dict[str, _Followed] = {}
        self._invisible: set[str] = set()  # published training groups that verl's table does not show yet
        self._all_visible = asyncio.Event()
        self._num_published = 0  # training groups, ever
        self._failures: set[str] = set()  # logged
        self._log = ScheduleLog(None, 0.0)
        self._tasks: list[asyncio.Task] = []
        self._reports: list[UnitReport] = []
        self._versions: list[tuple[int, int]] = []  # first and last, of finished answers
        self._saved_step: int | None = None
        self._choice: Choice | None = None
        self._choosing: asyncio.Task | None = None

    # From the agent-loop manager.

    async def configure(self, settings: RouterSettings, workers: dict[str, Any], table: GroupTable | None) -> None:
        """Begin to schedule. Called once, before the first batch.

        Args:
            settings: of the job.
            workers: handles of the agent-loop workers, by name.
            table: verl's; needed where units are held.
        """
        logs.show()
        self._settings, self._table, job = settings, table, settings.job
        self._scheduler = Scheduler(job, self)
        await self._ask_cache(self._handles)
        self._scheduler.lanes.add_replicas(self._handles, time.monotonic())
        self._log = ScheduleLog(settings.log_folder, time.time() - time.monotonic())
        if settings.resume_from is not None:
            load_lengths(Path(settings.resume_from), self._scheduler.lengths)
        self._tasks = [asyncio.create_task(self._every(TICK_SECONDS, self._tick))]
        self._tasks += [asyncio.create_task(self._watch_worker(name, one)) for name, one in workers.items()]
        self._watch_replicas(self._handles)
        how = "each batch as it comes"
        if job.shape is not None:
            how = (
                f"units of {job.shape.batches} batches, of which {job.shape.carried} groups are carried over "
                f"(pipe.max_age={job.max_age}), until lengths are known"
            )
        logger.info("HistoPipe schedules %d replicas of %d lanes: %s", len(self._handles), job.max_running, how)

    async def submit(self, groups: Sequence[Group], *, validate: bool) -> None:
        """Take groups that are about to reach the workers."""
        self._groups.update((group.uid, _Followed(validate)) for group in groups)
        if validate:
            self._scheduler.submit_validation(groups, time.monotonic())
            return
        available = await self._count_available() if self._scheduler.units.shape is not None else 0
        self._scheduler.submit(groups, available, time.monotonic())
        self._consider_choice(groups)

    async def metrics(self) -> list[dict[str, float]]:
        """Return what has been measured since the last call, one mapping per completed unit."""
        reports, self._reports = self._reports, []
        versions, self._versions = self._versions, []
        lines = [
            {
                "step": report.step,
                "answers": report.answers,
                "tokens": report.tokens,
                "makespan_s": report.seconds,
                "bubble": report.bubble,
                "idle": report.idle,
                "carried_groups": report.carried,
                "predictor_rank_correlation": report.error.rank_correlation,
                "predictor_below_p50": report.error.below_p50,
                "predictor_below_p90": report.error.below_p90,
            }
            for report in reports
        ]
        if lines and versions:
            lines[-1]["versions_spanned"] = sum(last > first for first, last in versions) / len(versions)
        return [{name: value for name, value in line.items() if not math.isnan(value)} for line in lines]

    # From workers.

    async def news(self, worker: str) -> News:
        """Return what is new for a worker, as soon as anything is."""
        found = self._workers.setdefault(worker, _Worker())
        news = await found.listen()
        names = {name for _, name, _ in news.lanes if name is not None} - found.known
        news.handles = {name: self._handles[name] for name in names if name in self._handles}
        found.known |= news.handles.keys()
        return news

    async def report(self, worker: str, reports: Sequence[Report]) -> None:
        """Take what has happened in a worker, in order."""
        now = time.monotonic()
        for one in reports:
            try:
                self._take(worker, one, now)
            except Exception as error:
                self._log_failure("take a worker's report", error)
        self._collect()

    # verl's protocol.

    async def acquire_server(self, request_id: str) -> tuple[str, Any]:
        """Return the replica and handle for a request of no known answer.

        Raises:
            RuntimeError: there is no replica.
        """
        name = self._scheduler.lanes.least_loaded()
        self._scheduler.lanes.replicas[name].others += 1
        return name, self._handles[name]

    async def release_server(self, server_id: str) -> None:
        found = self._scheduler.lanes.replicas.get(server_id)
        if found is not None:
            found.others = max(0, found.others - 1)

    async def require_acquire_fields(self) -> list[str]:
        return []

    async def require_release_fields(self) -> list[str]:
        return []

    async def add_servers(self, servers: dict[str, Any]) -> None:
        self._handles.update(servers)
        for worker in self._workers.values():
            worker.known -= servers.keys()
        await self._ask_cache(servers)
        self._watch_replicas(servers)
        self._scheduler.lanes.add_replicas(servers, time.monotonic())

    async def remove_servers(self, server_ids: list[str]) -> None:
        for name in server_ids:
            self._handles.pop(name, None)
        self._scheduler.lanes.remove_replicas(server_ids, time.monotonic())

    async def get_all_servers(self) -> list[str]:
        return list(self._scheduler.lanes.replicas)

    async def get_inflight_count(self, server_id: str) -> int:
        return self._loads().get(server_id, 0)

    async def get_total_inflight(self) -> int:
        return sum(self._loads().values())

    async def clear_sticky_cache(self) -> dict[str, Any]:
        return {"cleared_entries": 0, "server_loads": self._loads()}

    async def get_status(self) -> dict[str, Any]:
        loads, units = self._loads(), self._scheduler.units
        return {
            "servers": loads,
            "total_inflight": sum(loads.values()),
            "active_servers": len(loads),
            "registered_handles": list(self._handles),
            "waiting": self._scheduler.lanes.waiting,
            "unopened_groups": units.waiting,
            "open_groups": units.in_flight,
            "unit": units.number,
        }

    # Decisions of the scheduler.

    def grant(self, answer: AnswerId, replica: str, predicted_tokens: float) -> None:
        self._tell((answer, replica, predicted_tokens))

    def park(self, answer: AnswerId) -> None:
        self._tell((answer, None, 0.0))

    def publish(self, uid: str) -> None:
        found = self._groups.pop(uid, None)
        if found is None or found.worker is None:
            return
        if not found.is_validation:
            self._invisible.add(uid)
            self._num_published += 1
        self._workers[found.worker].change().published.append(uid)

    # How.

    def _tell(self, lane: Lane) -> None:
        found = self._groups.get(lane[0][0])
        if found is not None:
            (found.missed if found.worker is None else self._workers[found.worker].change().lanes).append(lane)

    def _take(self, worker: str, one: Report, now: float) -> None:
        match one:
            case Started(answer):
                self._scheduler.start(answer, now)
            case Stopped(answer):
                self._scheduler.lanes.stop(answer, now)
            case Finished():
                schedule = self._scheduler.finish(one, now)
                if schedule is not None:
                    self._log.add(schedule)
                    if one.versions is not None:
                        self._versions.append(one.versions)
            case GroupEnded(uid, failed):
                self._scheduler.end_group(uid, failed, now)
            case GroupVisible(uid):
                self._invisible.discard(uid)
                if not self._invisible:
                    self._all_visible.set()
            case Follows(uids):
                self._follow(worker, uids)

    def _follow(self, worker: str, uids: Sequence[str]) -> None:
        channel = self._workers.setdefault(worker, _Worker())
        for uid in uids:
            found = self._groups.get(uid)
            if found is None:  # not submitted: this router knows nothing of it, and nothing waits for it
                channel.change().published.append(uid)
                continue
            found.worker = worker
            if found.missed:
                channel.change().lanes.extend(found.missed)
                found.missed = []

    def _collect(self) -> None:
        reports = self._scheduler.take_reports()
        if reports:
            self._reports += reports
            self._log.flush()

    def _loads(self) -> dict[str, int]:
        return {name: one.running + one.others for name, one in self._scheduler.lanes.replicas.items()}

    async def _count_available(self) -> int:
        """Count in verl's table, once it shows all that has been published; again if more is published meanwhile."""
        while self._table is not None:
            if self._invisible:
                self._all_visible.clear()
                try:
                    await asyncio.wait_for(self._all_visible.wait(), VISIBLE_SECONDS)
                except asyncio.TimeoutError:
                    self._log_failure("see all published groups in verl's table", TimeoutError(len(self._invisible)))
                    self._invisible.clear()
            published = self._num_published
            available = await asyncio.to_thread(self._table.count_available)
            if published == self._num_published:
                return available
        return 0

    async def _watch_worker(self, name: str, worker: Any) -> None:
        """Notice the death of a worker: its groups will never finish, and nothing may wait for them."""
        reason = await _death(worker.stay)
        lost = [uid for uid, found in self._groups.items() if found.worker == name]
        if reason is not None:
            logger.error(
                "agent-loop worker %s is dead, and with it %d groups; verl ends the job when it needs the worker: %s",
                name, len(lost), reason,
            )  # fmt: skip
        for uid in lost:
            del self._groups[uid]
        for uid in lost:
            self._scheduler.end_group(uid, True, time.monotonic())
        self._collect()
        if lost and self._table is not None:
            await asyncio.to_thread(self._table.mark_failed, lost)

    async def _watch_replica(self, name: str, handle: Any) -> None:
        """Notice the death of a replica: it gets no new answers."""
        reason = await _death(handle.rhyme_stay)
        if self._handles.get(name) is handle:
            if reason is not None:
                logger.error(
                    "replica %s is dead; its answers fail, and verl ends the job at its next change of weights: %s",
                    name, reason,
                )  # fmt: skip
            await self.remove_servers([name])

    def _watch_replicas(self, servers: dict[str, Any]) -> None:
        self._tasks += [
            asyncio.create_task(self._watch_replica(name, handle))
            for name, handle in servers.items()
            if hasattr(handle, "rhyme_stay")
        ]

    async def _ask_cache(self, servers: dict[str, Any]) -> None:
        """Learn how many tokens the caches hold, from servers that can tell."""
        asked = [one.rhyme_cache_tokens.remote() for one in servers.values() if hasattr(one, "rhyme_cache_tokens")]
        known = [tokens for tokens in await asyncio.gather(*asked) if tokens]
        if known:
            self._scheduler.cache_tokens = min([*known, self._scheduler.cache_tokens or known[0]])

    async def _every(self, seconds: float, act: Callable[[], Awaitable[None]]) -> None:
        """Act again and again; a failure does not end it."""
        while True:
            await asyncio.sleep(seconds)
            try:
                await act()
            except Exception as error:
                self._log_failure(act.__name__.strip("_").replace("_", " "), error)

    def _log_failure(self, what: str, error: Exception) -> None:
        if what not in self._failures:
            self._failures.add(what)
            logger.error("HistoPipe's router could not %s, and goes on: %s", what, error, exc_info=error)

    async def _tick(self) -> None:
        self._scheduler.lanes.expire(time.monotonic())
        if self._scheduler.units.is_withholding:  # the trainer takes a batch without telling anybody
            available = await self._count_available()
            self._scheduler.publish_more(available, time.monotonic())
        if self._settings.checkpoints is not None:
            await self._save_lengths(Path(self._settings.checkpoints))

    async def _save_lengths(self, folder: Path) -> None:
        step = latest_step(folder)
        if step is not None and step != self._saved_step and len(self._scheduler.lengths):
            self._saved_step = step
            await asyncio.to_thread(save_lengths, folder, step, self._scheduler.lengths.state())

    def _consider_choice(self, groups: Sequence[Group]) -> None:
        """Choose the shape of units anew when an epoch of lengths has been learnt since the last choice."""
        scheduler, lengths = self._scheduler, self._scheduler.lengths
        if scheduler.job.max_age < 2 or scheduler.units.shape is None or self._choosing is not None:
            return
        if scheduler.num_since_choice >= max(1, lengths.num_prompts) and lengths.knows(groups[0].prompt):
            scheduler.num_since_choice = 0
            self._choosing = asyncio.create_task(self._choose())

    async def _choose(self) -> None:
        try:
            choice = await choose_shape(self._scheduler, self._settings.warmup_batches, self._settings.samples)
            if choice is not None:
                self._scheduler.units.shape = choice.shape
                if self._choice is None or choice.shape != self._choice.shape:
                    logger.info("HistoPipe: %s", choice)
                self._choice = choice
        except Exception as error:
            self._log_failure("choose the shape of units", error)
        finally:
            self._choosing = None


async def _death(stay: Any) -> str | None:
    """Wait until the actor of a method that never returns is dead; None: it died with its job, not before."""
    try:
        await stay.remote()
    except RayActorError as error:
        reason = str(error)
        return None if OWNER_DIED in reason else reason.partition("\n")[0]
    return None


HistoPipeRouter = ray.remote(max_concurrency=MAX_CALLS)(Router)  # type: ignore[call-overload]
