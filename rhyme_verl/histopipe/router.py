"""The Ray actor that replaces verl's load balancer and runs the `Scheduler` for all agent-loop workers.

It forwards the scheduler's decisions (`news_board`), receives the workers' reports (`messages`), and notices when a
worker or replica dies. Of verl, it depends on the load balancer protocol only.

An exception in any of this ends HistoPipe, but neither the actor nor the job: what remains is a plain load balancer,
and workers are told to use it. Ray restarts a router that was killed; it is then nothing but a load balancer, too.
"""

from __future__ import annotations

import asyncio
import functools
import gc
import logging
import math
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from rhyme_verl.histopipe import messages
from rhyme_verl.histopipe.actor_death import death_of
from rhyme_verl.histopipe.lengths_file import load_lengths, save_lengths
from rhyme_verl.histopipe.load_balancer import LoadBalancer
from rhyme_verl.histopipe.news_board import NewsBoard
from rhyme_verl.histopipe.scheduler import Job, Scheduler
from rhyme_verl.history import snapshot
from rhyme_verl.request_id import AnswerId
from rhyme_verl.telemetry import logs
from rhyme_verl.telemetry.files import JsonLines

logger = logging.getLogger(__name__)

MAX_CALLS = 4096  # concurrent calls: each worker keeps one open to listen
TICK_SECONDS = 0.5
STALL_SECONDS = 1200.0  # without any report, while a unit waits for answers; one request rarely takes as long
NO_FULL_COLLECTION = 10_000, 10, 10**9  # of garbage, which would walk all answers while all calls wait


def _ends_histopipe(method: Callable[..., Awaitable[Any]]) -> Callable[..., Any]:
    """Make a router's method end HistoPipe if it raises; then it returns None, and from then on without being run."""

    @functools.wraps(method)
    async def call(self: Router, *arguments: Any, **named: Any) -> Any:
        if self._is_scheduling:
            try:
                result = await method(self, *arguments, **named)
                return result if self._is_scheduling else None
            except Exception as error:
                self._fail(error)
        return None

    return call


class Router(LoadBalancer):
    """Implements the router in one event loop; `HistoPipeRouter` is the Ray actor."""

    def __init__(self, servers: dict[str, Any], config: dict[str, Any] | None = None) -> None:
        super().__init__(servers)
        self._is_scheduling = False  # not before it is configured, and no longer once it has failed
        self._scheduler: Scheduler
        self._board = NewsBoard()
        self._num_reports: dict[str, int] = {}  # by worker, number of the latest call of `report`
        self._table: messages.GroupTable | None = None
        self._reported_at = math.inf  # time of the latest report
        self._log_once = logs.LogOnce(logger)
        self._published: set[str] = set()  # uids, of units, that verl's trainer may not have taken
        self._log = JsonLines(None, "HistoPipe's schedules")
        self._log_lines: list[dict[str, Any]] = []  # not yet written
        self._clock_offset = time.time() - time.monotonic()
        self._may_deal = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []
        self._watched: set[Any] = set()  # handles of replicas
        self._started_at = 0.0  # `snapshot.newest_time` when this run began
        self._finished_step: int | None = None
        self._is_dead = False  # no replica is alive

    # Called by the agent-loop manager.

    async def configure(self, job: Job, workers: dict[str, Any], table: messages.GroupTable | None) -> None:
        """Start scheduling, before the first batch. A repeated call has no effect.

        `workers`: handles of the agent-loop workers, by name; `table` is needed if finished groups are held back.
        """
        if self._is_scheduling:
            return
        logs.show()
        gc.set_threshold(*NO_FULL_COLLECTION)
        self._table, self._scheduler, self._is_scheduling = table, Scheduler(job, self), True
        await self._begin(job, workers)

    @_ends_histopipe
    async def _begin(self, job: Job, workers: dict[str, Any]) -> None:
        await self._ask_cache(self._handles)
        self._scheduler.lanes.add_replicas(self._handles, time.monotonic())
        if job.log_folder is not None:
            self._log.path = Path(job.log_folder) / "pipe.jsonl"
        if job.checkpoints is not None:
            self._started_at = await asyncio.to_thread(snapshot.newest_time, Path(job.checkpoints))
        if job.resume_from is not None:
            load_lengths(Path(job.resume_from), self._scheduler.lengths)
        endless = [
            self._every(TICK_SECONDS, self._tick),
            self._deal(),
            *(self._watch_worker(*one) for one in workers.items()),
        ]
        self._tasks = [asyncio.create_task(one) for one in endless]
        self._watch_replicas(self._handles)
        how = "each batch on arrival" if job.shape is None else f"{job.shape} (pipe.max_age={job.max_age})"
        logger.info("HistoPipe schedules %d replicas of %d lanes: %s", len(self._handles), job.max_running, how)

    async def submit(self, groups: Sequence[messages.Group], *, validate: bool) -> bool:
        """Take groups that are about to be sent to the workers, and return whether HistoPipe schedules them.

        If not, it has ended, and the job goes on without it. A repeated call has no effect.

        Raises:
            RuntimeError: no replica is alive.
        """
        if self._is_dead:
            raise RuntimeError("all replicas are dead; their errors are above")
        await self._submit(groups, validate)
        return self._is_scheduling

    @_ends_histopipe
    async def _submit(self, groups: Sequence[messages.Group], validate: bool) -> None:
        groups = self._board.add(groups, validate)
        if groups and validate:
            self._scheduler.submit_validation(groups, time.monotonic())
        elif groups:
            available = await self._count_available() if self._scheduler.units.shape is not None else 0
            self._scheduler.submit(groups, available, time.monotonic())
            self._may_deal.set()

    @_ends_histopipe
    async def metrics(self) -> list[dict[str, float]]:
        """Return the metrics since the last call, one mapping per completed unit."""
        return self._scheduler.take_reports()

    # Called by workers and replicas.

    @_ends_histopipe
    async def news(self, worker: str, received: int) -> messages.News:
        """Wait for news after the number `received`, and return it; None: HistoPipe has ended, go on without it."""
        news, missing = await self._board.listen(worker, received)
        news.handles |= {name: self._handles[name] for name in missing if name in self._handles}
        return news

    @_ends_histopipe
    async def report(self, worker: str, number: int, reports: Sequence[messages.Report]) -> None:
        """Process a worker's reports, in order; `number` counts its calls, so that a repeated one has no effect."""
        if number <= self._num_reports.get(worker, 0):
            return
        self._num_reports[worker] = number
        self._reported_at = now = time.monotonic()
        for one in reports:
            self._take(worker, one, now)
        self._may_deal.set()

    @_ends_histopipe
    async def finish_step(self, step: int) -> None:
        """Save the lengths of answers if this run has saved a checkpoint of this step. Repeated calls do nothing."""
        folder = self._scheduler.job.checkpoints
        if folder is None or step == self._finished_step or not len(self._scheduler.lengths):
            return
        self._finished_step, checkpoint = step, Path(folder) / f"global_step_{step}"
        if await asyncio.to_thread(snapshot.saved_time, checkpoint) > self._started_at:
            await asyncio.to_thread(save_lengths, checkpoint, self._scheduler.lengths.state())

    # The rest of verl's load balancer protocol.

    async def add_servers(self, servers: dict[str, Any]) -> None:
        await super().add_servers(servers)
        self._is_dead = False
        await self._admit(servers)

    @_ends_histopipe
    async def _admit(self, servers: dict[str, Any]) -> None:
        self._board.forget_replicas(servers)
        await self._ask_cache(servers)
        self._watch_replicas(servers)
        self._scheduler.lanes.add_replicas(servers, time.monotonic())

    async def remove_servers(self, server_ids: list[str]) -> None:
        await super().remove_servers(server_ids)
        await self._dismiss(server_ids)

    @_ends_histopipe
    async def _dismiss(self, names: list[str]) -> None:
        self._scheduler.lanes.remove_replicas(names, time.monotonic())

    async def get_status(self) -> dict[str, Any]:
        status = await super().get_status()
        if self._is_scheduling:
            status |= {"waiting": self._scheduler.lanes.waiting, "unopened_groups": self._scheduler.units.waiting}
        return status

    def _loads(self) -> dict[str, int]:
        loads = super()._loads()
        for name, replica in self._scheduler.lanes.replicas.items() if self._is_scheduling else ():
            loads[name] += replica.running
        return loads

    # The scheduler's outbox.

    def grant(self, answer: AnswerId, replica: str) -> None:
        self._board.tell((answer, replica))

    def park(self, answer: AnswerId) -> None:
        self._board.tell((answer, None))

    def publish(self, uid: str) -> None:
        if self._board.publish(uid) and self._scheduler.units.shape is not None:
            self._published.add(uid)

    # Internals.

    def _fail(self, error: Exception) -> None:
        """End HistoPipe, because its state may be inconsistent. Further exceptions follow from that and are ignored."""
        if not self._is_scheduling:
            return
        self._is_scheduling = False
        logger.error("HistoPipe has failed, and the job goes on without it", exc_info=error)
        for task in self._tasks:
            task.cancel()
        self._board.wake_all()

    def _take(self, worker: str, one: messages.Report, now: float) -> None:
        match one:
            case messages.Begun(uid):
                self._scheduler.units.start(uid)
            case messages.Started(answer):
                self._scheduler.start(answer, now)
            case messages.Stopped(answer):
                self._scheduler.lanes.stop(answer, now)
            case messages.Finished():
                for line in self._scheduler.finish(one, now):
                    unix = {end: round(line[end] + self._clock_offset, 4) for end in ("start", "end")}
                    self._log_lines.append(line | unix)
            case messages.GroupEnded(uid, failed):
                self._scheduler.end_group(uid, failed, now)
                if failed:  # verl replaces it
                    self._published.discard(uid)
            case messages.Follows(uids):
                self._board.follow(worker, uids)

    async def _count_available(self) -> int:
        """Count the groups that verl's trainer can take: those published here may not be finished in its table yet."""
        if self._table is None:
            return 0
        asked = frozenset(self._published)
        available = await asyncio.to_thread(self._table.available, asked)
        self._published -= asked - available  # the trainer has taken or filtered these
        return len(available | self._published)

    @_ends_histopipe
    async def _watch_worker(self, name: str, worker: Any) -> None:
        """Notice the death of a worker: its groups will never finish, so nothing may wait for them."""
        reason = await death_of(worker.stay)
        if reason is None:
            return
        lost = self._board.remove_groups_of(name)
        message = "agent-loop worker %s is dead, and with it %d groups; verl ends the job when it needs the worker: %s"
        logger.error(message, name, len(lost), reason)
        for uid in lost:
            self._scheduler.end_group(uid, True, time.monotonic())
        self._published.clear()  # those of the worker may never be finished in verl's table
        if self._table is not None and lost:
            await asyncio.to_thread(self._table.mark_failed, lost)

    @_ends_histopipe
    async def _watch_replica(self, name: str, handle: Any) -> None:
        """Notice the death of a replica: it gets no new answers."""
        if hasattr(handle, "rhyme_set_router"):
            handle.rhyme_set_router.remote(ray.get_runtime_context().current_actor)
        reason = await death_of(handle.rhyme_stay)
        self._watched.discard(handle)
        if reason is None or self._handles.get(name) != handle:
            return
        message = "replica %s is dead; its answers fail, and verl ends the job at its next change of weights: %s"
        logger.error(message, name, reason)
        if len(self._handles) == 1:
            self._is_dead = True  # it keeps its lanes, so that waiting answers get one and fail
        else:
            await self.remove_servers([name])

    def _watch_replicas(self, servers: dict[str, Any]) -> None:
        """Watch replicas that are not watched yet: verl removes and adds the same ones, for example for validation."""
        new = {name: one for name, one in servers.items() if one not in self._watched and hasattr(one, "rhyme_stay")}
        self._watched.update(new.values())
        self._tasks += [asyncio.create_task(self._watch_replica(name, handle)) for name, handle in new.items()]

    async def _ask_cache(self, servers: dict[str, Any]) -> None:
        """Learn from servers that report it how many tokens their KV caches hold."""
        asked = [each.rhyme_cache_tokens.remote() for each in servers.values() if hasattr(each, "rhyme_cache_tokens")]
        known = [tokens for tokens in await asyncio.gather(*asked) if tokens]
        if known:
            self._scheduler.cache_tokens = min([*known, self._scheduler.cache_tokens or known[0]])

    @_ends_histopipe
    async def _deal(self) -> None:
        """Grant lanes between calls: workers report at once when a batch begins, and each would wait for all grants."""
        while await self._may_deal.wait():
            self._may_deal.clear()
            if self._scheduler.lanes.deal(time.monotonic()):
                self._may_deal.set()
            await asyncio.sleep(0)

    @_ends_histopipe
    async def _every(self, seconds: float, act: Callable[[], Awaitable[None]]) -> None:
        while True:
            await asyncio.sleep(seconds)
            await act()

    async def _tick(self) -> None:
        self._scheduler.lanes.expire(time.monotonic())
        self._may_deal.set()
        if self._scheduler.units.is_withholding:  # the trainer does not announce that it takes a batch
            self._scheduler.publish_more(await self._count_available(), time.monotonic())
        self._warn_of_stall()
        lines, self._log_lines = self._log_lines, []
        await asyncio.to_thread(self._log.append, lines)

    def _warn_of_stall(self) -> None:
        """Say so if answers never end: later, their groups would be too old, so the trainer waits for them."""
        awaited = self._scheduler.units.awaited
        if awaited and time.monotonic() - self._reported_at > STALL_SECONDS:
            message = "no request has begun or ended for %d minutes, but %d groups are unfinished (the first: %s), and "
            message += "pipe.max_age does not let the trainer go on without them; give tools and rewards a timeout"
            self._log_once(logging.WARNING, message, STALL_SECONDS // 60, len(awaited), awaited[0])


def __getattr__(name: str) -> Any:
    """Return `HistoPipeRouter`, the actor class. It is made when verl's trainer looks it up, and starts on that node.

    Calls made while Ray restarts the router are repeated, also those of verl. A start must not wait for a free CPU. If
    the node dies, so does the trainer, and the router is not needed elsewhere.
    """
    if name != "HistoPipeRouter":
        raise AttributeError(f"module {__name__} has no attribute {name}")
    options: dict[str, Any] = {"num_cpus": 0, "max_concurrency": MAX_CALLS, "max_restarts": -1, "max_task_retries": -1}
    if ray.is_initialized():
        here = ray.get_runtime_context().get_node_id()
        options["scheduling_strategy"] = NodeAffinitySchedulingStrategy(here, soft=False)
    return ray.remote(**options)(Router)
