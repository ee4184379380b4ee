"""The agent-loop worker with HistoPipe: what it reports and when a group may be seen; a fake stands in for verl."""

import asyncio
import logging
from types import SimpleNamespace

import pytest

from rhyme_verl.histopipe import worker_lanes
from rhyme_verl.histopipe.messages import Begun, Finished, Follows, GroupEnded, News, Started, Stopped
from rhyme_verl.histopipe.worker_lanes import WorkerLanes
from rhyme_verl.integration import agent_loop_worker
from rhyme_verl.integration.agent_loop_worker import RhymeAgentLoopWorker
from rhyme_verl.integration.routed_client import running_answer
from rhyme_verl.telemetry.logs import LogOnce
from rhyme_verl.telemetry.trace import TrajectoryRecorder, read_trace

pytestmark = pytest.mark.engine

SAMPLES = 2


class Router:
    """The router's handle: grants every lane at once and notes reports; groups are published when the test says so."""

    def __init__(self):
        self.events, self.published = [], asyncio.Event()
        self.report, self.news = (SimpleNamespace(remote=method) for method in (self._report, self._news))

    async def _report(self, worker, number, reports):
        self.events += reports

    async def _news(self, worker, received):
        if received == 0:
            lanes = [(("a", sample), "replica") for sample in range(SAMPLES)]
            return News(1, lanes=lanes, handles={"replica": None})
        await self.published.wait()
        return News(2, published=["a"]) if received == 1 else await asyncio.Event().wait()


def output(num_tokens):
    return SimpleNamespace(
        prompt_ids=[1, 2, 3],
        response_ids=[7] * num_tokens + [8, 8],
        response_mask=[1] * num_tokens + [0, 0],
        extra_fields={"min_global_steps": 4, "max_global_steps": 5},
    )


@pytest.fixture
def worker(monkeypatch):
    """A worker without verl's state; verl's methods run the samples of a prompt, sample 1 with `fails` fails."""

    async def run_prompt(self, prompt, sampling_params, trajectory, trace=False):
        if prompt.get("breaks"):
            raise RuntimeError("no agent loop of that name")
        if prompt.get("__rollout_n__") == 0:
            return
        runs = (
            self._run_agent_loop(sampling_params, trajectory, uid=prompt["uid"], session_id=sample, prompt=prompt)
            for sample in range(SAMPLES)
        )
        await asyncio.gather(*map(asyncio.create_task, runs), return_exceptions=True)

    async def run_agent_loop(self, sampling_params, trajectory, *, uid, session_id, prompt):
        assert running_answer.get().answer == (uid, session_id)
        if not prompt.get("elsewhere"):
            running_answer.get().known_tokens([1, 2, 3])  # as verl's client does with each request
        if session_id == 1 and prompt.get("fails"):
            raise RuntimeError("the tool failed")
        await self._agent_loop_postprocess(output(5 + session_id), False, uid=uid, session_id=session_id)

    async def postprocess(self, output, validate, **kwargs):
        pass

    base = agent_loop_worker._VerlWorker
    monkeypatch.setattr(base, "_run_prompt", run_prompt)
    monkeypatch.setattr(base, "_run_agent_loop", run_agent_loop)
    monkeypatch.setattr(base, "_agent_loop_postprocess", postprocess)
    subject = object.__new__(RhymeAgentLoopWorker)
    subject.rollout_config = SimpleNamespace(n=SAMPLES, val_kwargs=SimpleNamespace(n=1), response_length=8)
    subject._history = subject._recorder = None
    monkeypatch.setattr(worker_lanes, "FLUSH_SECONDS", 0.0)
    subject._log_once = LogOnce(agent_loop_worker.logger)
    return subject


def play(worker, prompt):
    """Run group "a" to its end; return what the router was told before its publication, then after it, and errors."""

    async def scenario():
        router = Router()
        worker._lanes = WorkerLanes(router, "w")
        worker._lanes.follow(["a"])
        running = asyncio.create_task(worker._run_prompt({"uid": "a", **prompt}, {}, {"validate": False}))
        for _ in range(30):
            await asyncio.sleep(0)
        assert running.done() == ("breaks" in prompt), "a group is not seen before it is published"
        before = list(router.events)
        router.published.set()
        (result,) = await asyncio.gather(running, return_exceptions=True)
        for _ in range(30):
            await asyncio.sleep(0)
        assert not worker._lanes._groups
        return before, router.events[len(before) :], result

    return asyncio.run(scenario())


def test_a_group_is_seen_after_its_publication_and_lanes_are_free_before(worker, caplog):
    before, after, _ = play(worker, {})
    assert not caplog.records
    assert before == [
        Follows(["a"]),
        Begun("a"),
        Finished(("a", 0), tokens=5, truncated=False, prompt_tokens=3, tool_tokens=2, versions=(4, 5)),
        Finished(("a", 1), tokens=6, truncated=True, prompt_tokens=3, tool_tokens=2, versions=(4, 5)),
        GroupEnded("a", False),
    ]
    assert not after


def test_a_failed_answer_frees_its_lane_and_its_group_ends_as_failed(worker):
    before, after, _ = play(worker, {"fails": True})
    assert set(map(type, before[2:4])) == {Finished} and Finished(("a", 1), tokens=None) in before
    assert before[4:] == [GroupEnded("a", True)] and not after


def test_requests_from_outside_the_answers_context_are_named_once_and_its_age_counts_all_the_same(worker, caplog):
    before, _, _ = play(worker, {"elsewhere": True})
    assert before[:2] == [Follows(["a"]), Begun("a")]
    (record,) = caplog.records
    assert "come without their answer's context" in record.message


def test_a_group_that_fails_before_its_answers_begin_is_abandoned(worker):
    before, after, error = play(worker, {"breaks": True})
    assert before[1:] == [GroupEnded("a", True)] and not after
    assert isinstance(error, RuntimeError)


def test_a_group_without_samples_ends_at_once(worker):
    before, after, _ = play(worker, {"__rollout_n__": 0})
    assert before[1:] == [GroupEnded("a", False)] and not after


def test_a_request_after_the_end_of_its_answer_does_not_wait_for_a_lane(worker):
    async def scenario():
        router = Router()
        lanes = WorkerLanes(router, "w")
        lanes.follow(["a"])
        await lanes.open("a", 1)
        assert await lanes.lane(("a", 0)) is not None
        lanes.finish(Finished(("a", 0), tokens=5))
        late = [await lanes.lane(("a", 0))]
        router.published.set()
        await lanes.end(("a", 0), failed=False)
        lanes.close("a")
        return [*late, await lanes.lane(("a", 0))]

    assert asyncio.run(asyncio.wait_for(scenario(), 10)) == [None, None]


def test_requests_from_a_thread_with_its_own_event_loop_are_those_of_their_answer(worker):
    """An agent loop may run a synchronous framework, whose model is a function that calls `asyncio.run`."""

    async def scenario():
        router = Router()
        lanes = WorkerLanes(router, "w")

        async def request():
            lane = await lanes.lane(("a", 0))
            lanes.start(("a", 0))
            lanes.stop(("a", 0))
            return lane.replica

        lanes.follow(["a"])
        await lanes.open("a", 1)
        assert await asyncio.to_thread(asyncio.run, request()) == "replica"
        router.published.set()
        await lanes.end(("a", 0), failed=False)
        while len(router.events) < 5:
            await asyncio.sleep(0)
        return router.events

    events = asyncio.run(asyncio.wait_for(scenario(), 10))
    answer = ("a", 0)
    ends = [Finished(answer, tokens=None), GroupEnded("a", False)]
    assert events == [Follows(["a"]), Started(answer), Stopped(answer), *ends]


def turns(*texts):
    """Return one output per turn, each a prompt (the whole context) and a response."""
    return [
        SimpleNamespace(prompt_ids=prompt, response_ids=response, extra_fields={}, reward_score=None)
        for prompt, response in texts
    ]


def test_a_trace_has_all_tokens_of_an_answer_with_several_outputs(worker, monkeypatch, tmp_path, caplog):
    """An answer whose context was rewritten is no continuous text: it is left out, which is logged once."""
    seen = []

    async def compute_score(self, outputs, kwargs, validate=False):
        seen.append(validate)
        outputs[-1].reward_score = 0.5

    monkeypatch.setattr(agent_loop_worker._VerlWorker, "_compute_score", compute_score)
    answers = [
        turns(([1, 2], [3, 4])),
        turns(([1, 2], [3, 4]), ([1, 2, 3, 4, 90, 91], [5]), ([1, 2, 3, 4, 90, 91, 5, 92], [6, 7])),
        turns(([1, 2], [3, 4]), ([1, 2, 80], [5])),
        turns(([1, 2], [3, 4]), ([1, 2, 3], [5])),
    ]

    async def scenario():
        worker._recorder = recorder = TrajectoryRecorder(str(tmp_path))
        recorder.open_group("a", 1, False)
        for sample in range(len(answers)):
            recorder.start("a", sample)
        for sample, outputs in enumerate(answers):
            kwargs = {"uid": "a", "session_id": sample, "global_steps": 3}
            await worker._compute_score(outputs, kwargs=kwargs, validate=True)
            recorder.stop("a", sample)
        await recorder.close_group("a")

    asyncio.run(scenario())
    rows = read_trace(tmp_path).to_pylist()
    assert [(row["sample"], row["tokens"]) for row in rows] == [(0, [3, 4]), (1, [3, 4, 90, 91, 5, 92, 6, 7])]
    assert len({row["prompt_key"] for row in rows}) == 1
    (record,) = [one for one in caplog.records if one.levelno >= logging.WARNING]
    assert record.message.endswith("rewritten between two outputs, such as a (2)")
    assert seen == [True] * 4, "arguments that only a later verl passes reach it"
