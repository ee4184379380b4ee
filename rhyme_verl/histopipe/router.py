"""verl's load balancer, replaced: an actor that binds requests to replicas by HistoPipe's plan.

Without the dispatch module of rhyme_verl, which tells it what is to come, it sends every request at once to the replica
with the fewest, as verl's own does. With it, trajectories wait in their workers until they hear that a replica has room
for them; no call waits here, but for one of each worker, which listens for news. Knows verl's protocol of a load
balancer (`verl.workers.rollout.router.RequestLoadBalancer`) and nothing else of verl.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import math
import random
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import ray

from rhyme_verl import logs
from rhyme_verl.histopipe import step_cost
from rhyme_verl.histopipe.dispatcher import Dispatcher, Group, UnitReport
from rhyme_verl.histopipe.intake import Intake, PipeMode, Unit
from rhyme_verl.histopipe.lengths_file import load_lengths, save_lengths
from rhyme_verl.histopipe.places import Finish, Release
from rhyme_verl.histopipe.request_id import Trajectory, trajectory_of
from rhyme_verl.histopipe.schedule_log import ScheduleLog
from rhyme_verl.histopipe.trial import Trial

logger = logging.getLogger(__name__)

MAX_WORKERS = 4096  # that listen at a time
TICK_SECONDS = 0.5
TOP_UP_SECONDS = 0.1
ASKED_REPLICAS = 8  # in each tick


@dataclasses.dataclass(frozen=True, kw_only=True)
class RouterSettings:
    """What the router has to know of the job.

    Attributes:
        mode: how batches are rolled out; `pairs` is tried against `stream` if it is not forced.
        forced: the mode was set by the user and is kept.
        batch_size: prompts that the trainer takes at once.
        prefetched: batches that the trainer sends ahead.
        max_running: sequences that run at once on a replica.
        max_tokens: cap on the length of an answer.
        step_cost_path: measured step cost, or None.
        migrate: move answers that far outlive their prediction; needs a step cost, and clients that resume.
        log_folder: for the schedule, or None.
        checkpoints: verl's folder of checkpoints, in which lengths are saved too, or None.
        resume_from: checkpoint folder whose lengths are loaded, or None.
    """

    mode: PipeMode
    forced: bool
    batch_size: int
    prefetched: float
    max_running: int
    max_tokens: int
    step_cost_path: str | None = None
    migrate: bool = False
    log_folder: str | None = None
    checkpoints: str | None = None
    resume_from: str | None = None


@dataclasses.dataclass
class News:
    """What a worker wants to hear.

    Attributes:
        bound: trajectories that have a replica now.
        published: uids of finished prompts that the trainer may see.
    """

    bound: list[Trajectory] = dataclasses.field(default_factory=list)
    published: list[str] = dataclasses.field(default_factory=list)


class _Channel:
    """News for one worker that it has not heard yet."""

    def __init__(self) -> None:
        self._news = News()
        self._is_new = asyncio.Event()

    def bind(self, trajectory: Trajectory) -> None:
        self._news.bound.append(trajectory)
        self._is_new.set()

    def publish(self, uid: str) -> None:
        self._news.published.append(uid)
        self._is_new.set()

    async def listen(self) -> News:
        await self._is_new.wait()
        self._is_new.clear()
        news, self._news = self._news, News()
        return news


class Router:
    """The router's work, in one event loop; `HistoPipeRouter` is the actor."""

    def __init__(self, servers: dict[str, Any], config: dict[str, Any] | None = None) -> None:
        self._handles = dict(servers)
        self._dispatcher = Dispatcher(max_running=1, max_tokens=1)  # until there are settings
        self._dispatcher.add_replicas(servers, time.monotonic())
        self._intake = Intake("stream", 1, 0)
        self._trial: Trial | None = None  # None: the mode is settled
        self._settings: RouterSettings | None = None
        self._channels: dict[str, _Channel] = {}  # by worker
        self._followers: dict[str, _Channel] = {}  # by uid
        self._unheard: dict[str, list[Trajectory]] = {}  # bound before a worker had the prompt
        self._ended_early: dict[str, list[Finish]] = {}  # by uid, of prompts that wait to be opened
        self._told: set[str] = set()  # failures
        self._log = ScheduleLog(None, 0.0)
        self._tasks: list[asyncio.Task] = []
        self._reports: list[UnitReport] = []
        self._versions: list[tuple[int, int]] = []  # first and last, of finished answers
        self._saved_step = -1
        self._migrations = 0  # reported
        self._recompute_seconds: float | None = None  # of a token; None: nothing is migrated

    # From rhyme_verl's dispatch module.

    async def configure(self, settings: RouterSettings) -> None:
        """Begin to plan. Called once, before the first batch.

        Raises:
            ValueError: the step cost's file cannot be used.
        """
        logs.show()
        cost = None
        if settings.step_cost_path is not None:
            measured = step_cost.load(settings.step_cost_path)
            cost = measured.table(settings.max_running)
            self._recompute_seconds = measured.prefill_seconds_per_token if settings.migrate else None
        self._settings = settings
        self._dispatcher = Dispatcher(max_running=settings.max_running, max_tokens=settings.max_tokens, step_cost=cost)
        await self._ask_cache(self._handles)
        self._dispatcher.add_replicas(self._handles, time.monotonic())
        self._intake = Intake(settings.mode, settings.batch_size, settings.prefetched)
        if settings.mode == "pairs" and not settings.forced:
            self._trial = Trial(settings.batch_size, settings.prefetched)
        self._log = ScheduleLog(settings.log_folder, time.time() - time.monotonic())
        if settings.resume_from is not None:
            load_lengths(Path(settings.resume_from), self._dispatcher.predictor)
        self._tasks = [
            asyncio.create_task(self._every(TICK_SECONDS, self._tick)),
            asyncio.create_task(self._every(TOP_UP_SECONDS, self._top_up)),
        ]
        why = "set" if settings.forced else "by the trainer"
        if self._trial is not None:
            why += f"; the first {self._trial.num_steps} steps try it against stream"
        logger.info(
            "HistoPipe schedules %d replicas of %d lanes, mode %s (%s)",
            len(self._handles), settings.max_running, settings.mode, why,
        )  # fmt: skip

    async def submit(self, groups: Sequence[Group], *, validate: bool, available: int) -> None:
        """Take a batch that is about to be asked for.

        Args:
            groups: its prompts.
            validate: it is for a validation.
            available: training prompts that are finished and that the trainer has not taken.
        """
        now = time.monotonic()
        if validate:
            self._open(self._intake.submit_validation(groups), learn=False)
            return
        if self._trial is not None:
            self._try_mode(self._trial, len(groups), now)
        self._open(self._intake.submit(groups, available, now))

    async def follow(self, worker: str, uids: Sequence[str]) -> None:
        """A worker has these prompts now, and hears of them from now on."""
        channel = self._channels.setdefault(worker, _Channel())
        for uid in uids:
            self._followers[uid] = channel
            for trajectory in self._unheard.pop(uid, []):
                channel.bind(trajectory)

    async def news(self, worker: str) -> News:
        """Return what is new for a worker, as soon as anything is."""
        return await self._channels.setdefault(worker, _Channel()).listen()

    async def take_ended(self, ended: Sequence[Release | Finish]) -> None:
        """Take what has ended in a worker, in order."""
        now = time.monotonic()
        for one in ended:
            try:
                if isinstance(one, Release):
                    self._dispatcher.release(trajectory_of(one.request_id), one.replica, now)
                else:
                    self._finish(one, now)
            except Exception as error:
                self._say_failed("file what has ended", error)

    async def end_prompt(self, uid: str) -> None:
        """All answers to a prompt have ended, one way or the other; its worker hears when the trainer may see them."""
        self._ended_early.pop(uid, None)
        is_held = self._intake.is_held(uid)
        unit = self._intake.finish(uid)
        if not is_held:
            self._publish(uid)
        elif unit is not None:
            for group in unit.groups:
                self._publish(group.uid)

    async def fail(self, request_id: str) -> bool:
        """A request's replica does not answer any more; returns whether there are others."""
        trajectory = trajectory_of(request_id)
        replica = None if trajectory is None else self._dispatcher.replica_of(trajectory)
        if replica in self._handles and not await self._is_alive(replica) and replica in self._handles:
            logger.error("replica %s is dead: its answers begin anew on others", replica)
            await self.remove_servers([replica])
        return bool(self._dispatcher.replicas)

    async def metrics(self) -> list[dict[str, float]]:
        """Return what has been measured since the last call, one mapping for each unit of work that was completed."""
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
                "lost": report.lost,
                "predictor_rank_correlation": report.error.rank_correlation,
                "predictor_below_p50": report.error.below_p50,
                "predictor_below_p90": report.error.below_p90,
            }
            for report in reports
        ]
        if lines:
            lines[-1]["migrations"] = self._dispatcher.migrations - self._migrations
            self._migrations = self._dispatcher.migrations
        if lines and versions:
            lines[-1]["versions_spanned"] = sum(last > first for first, last in versions) / len(versions)
        return [{name: value for name, value in line.items() if not math.isnan(value)} for line in lines]

    # verl's protocol.

    async def acquire_server(self, request_id: str) -> tuple[str, Any]:
        """Return the request's replica and its handle.

        Raises:
            RuntimeError: there is no replica.
        """
        now = time.monotonic()
        trajectory = trajectory_of(request_id)
        if trajectory is not None and self._dispatcher.knows(trajectory):
            name = self._dispatcher.ask(trajectory, now)
        else:
            name = self._dispatcher.least_loaded()
            self._dispatcher.start_other(name)
        return name, self._handles[name]

    async def release_server(self, server_id: str, request_id: str | None = None) -> None:
        self._dispatcher.release(trajectory_of(request_id), server_id, time.monotonic())

    async def require_acquire_fields(self) -> list[str]:
        return []

    async def require_release_fields(self) -> list[str]:
        return ["request_id"]

    async def add_servers(self, servers: dict[str, Any]) -> None:
        self._handles.update(servers)
        await self._ask_cache(servers)
        self._tell(self._dispatcher.add_replicas(servers, time.monotonic()))

    async def remove_servers(self, server_ids: list[str]) -> None:
        for name in server_ids:
            self._handles.pop(name, None)
        self._tell(self._dispatcher.remove_replicas(server_ids, time.monotonic()))

    async def get_all_servers(self) -> list[str]:
        return self._dispatcher.replicas

    async def get_inflight_count(self, server_id: str) -> int:
        return self._dispatcher.requests_at(server_id) if server_id in self._handles else 0

    async def get_total_inflight(self) -> int:
        return sum(self._dispatcher.requests_at(name) for name in self._dispatcher.replicas)

    async def clear_sticky_cache(self) -> dict[str, Any]:
        cleared = self._dispatcher.forget_places()
        return {"cleared_entries": cleared, "server_loads": (await self.get_status())["servers"]}

    async def get_status(self) -> dict[str, Any]:
        loads = {name: self._dispatcher.requests_at(name) for name in self._dispatcher.replicas}
        return {
            "servers": loads,
            "total_inflight": sum(loads.values()),
            "active_servers": len(loads),
            "registered_handles": list(self._handles),
            "waiting": self._dispatcher.waiting,
            "not_opened": self._intake.waiting,
            "mode": self._intake.mode,
        }

    # How.

    def _finish(self, one: Finish, now: float) -> None:
        if self._intake.is_waiting(one.trajectory[0]):
            self._ended_early.setdefault(one.trajectory[0], []).append(one)
            return
        bound, finished, report = self._dispatcher.finish(
            one.trajectory, one.tokens, one.truncated, now, one.prompt_tokens
        )
        self._tell(bound)
        if finished is not None:
            if self._trial is not None and self._intake.is_training(finished.uid):
                self._trial.add(finished.tokens)
            self._log.add(finished)
            if one.versions is not None:
                self._versions.append(one.versions)
        if report is not None:
            self._report(report)

    def _open(self, unit: Unit | None, learn: bool = True) -> None:
        if unit is not None:
            planned, now = self._intake.mode != "stream", time.monotonic()
            self._tell(self._dispatcher.open(unit.groups, planned=planned, learn=learn, now=now))
            for group in unit.groups:
                for ended in self._ended_early.pop(group.uid, []):
                    self._finish(ended, now)

    def _tell(self, bound: Sequence[Trajectory]) -> None:
        for trajectory in bound:
            channel = self._followers.get(trajectory[0])
            if channel is None:
                self._unheard.setdefault(trajectory[0], []).append(trajectory)
            else:
                channel.bind(trajectory)

    def _publish(self, uid: str) -> None:
        channel = self._followers.pop(uid, None)
        if channel is not None:
            channel.publish(uid)

    def _report(self, report: UnitReport) -> None:
        self._log.flush()
        self._reports.append(report)

    def _try_mode(self, trial: Trial, prompts: int, now: float) -> None:
        before, self._intake.mode = trial.outcome, trial.begin(prompts, now)
        if trial.outcome is not None and trial.outcome is not before:
            logger.info(
                "HistoPipe tried pairs of steps and a stream of answers: with a stream the job made %.2f times as many "
                "tokens a second; it goes on with mode %s", trial.outcome.gain, trial.outcome.kept,
            )  # fmt: skip

    async def _observe_transit(self) -> None:
        """Ask some replicas how many requests they have, to learn how many are on their way to and from them."""
        if not self._dispatcher.waiting:
            return
        names = [name for name, handle in self._handles.items() if hasattr(handle, "rhyme_running")]
        names = random.sample(names, min(ASKED_REPLICAS, len(names)))
        lanes = [self._dispatcher.lanes_of(name) for name in names]
        try:
            calls = [self._handles[name].rhyme_running.remote() for name in names]
            running = await asyncio.wait_for(asyncio.gather(*calls), TICK_SECONDS)
        except (ray.exceptions.RayError, asyncio.TimeoutError):
            return  # whoever needs that replica will hear of it
        for held, there in zip(lanes, running, strict=True):
            self._dispatcher.observe_transit(held - there)

    def _migrate(self, now: float) -> None:
        if self._recompute_seconds is None:
            return
        for trajectory in self._dispatcher.outliers(self._recompute_seconds, now):
            replica = self._dispatcher.replica_of(trajectory)
            if replica is not None and replica in self._handles:
                self._handles[replica].rhyme_abort.remote(trajectory)

    async def _ask_cache(self, servers: dict[str, Any]) -> None:
        """Learn how many tokens the caches hold, from servers that can tell."""
        asked = [one.rhyme_cache_tokens.remote() for one in servers.values() if hasattr(one, "rhyme_cache_tokens")]
        known = [tokens for tokens in await asyncio.gather(*asked) if tokens]
        if known:
            self._dispatcher.cache_tokens = min([*known, self._dispatcher.cache_tokens or known[0]])

    async def _is_alive(self, replica: str) -> bool:
        try:
            await asyncio.wait_for(self._handles[replica].__ray_ready__.remote(), 10.0)
        except (ray.exceptions.RayActorError, asyncio.TimeoutError, KeyError):
            return False
        return True

    async def _every(self, seconds: float, act: Callable[[], Awaitable[None]]) -> None:
        """Act again and again; a failure does not end it."""
        while True:
            await asyncio.sleep(seconds)
            try:
                await act()
            except Exception as error:
                self._say_failed(act.__name__.strip("_").replace("_", " "), error)

    def _say_failed(self, what: str, error: Exception) -> None:
        if what not in self._told:
            self._told.add(what)
            logger.error("HistoPipe's router could not %s, and goes on: %s", what, error, exc_info=error)

    async def _top_up(self) -> None:
        self._tell(self._dispatcher.top_up(time.monotonic()))

    async def _tick(self) -> None:
        now = time.monotonic()
        self._open(self._intake.gathered(now))
        self._tell(self._dispatcher.expire(now))
        await self._observe_transit()
        if self._settings is not None and self._settings.checkpoints is not None:
            folder = Path(self._settings.checkpoints)
            self._saved_step = save_lengths(folder, self._dispatcher.predictor, self._saved_step)
        self._migrate(now)


HistoPipeRouter = ray.remote(max_concurrency=MAX_WORKERS)(Router)  # type: ignore[call-overload]
