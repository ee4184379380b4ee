"""The agent-loop worker with HistoPipe: what it reports and when a group may be seen; a fake stands in for verl."""

import asyncio
import logging
from types import SimpleNamespace

import pytest

from rhyme_verl.histopipe.messages import Finished
from rhyme_verl.histopipe.worker_lanes import GrantedLane
from rhyme_verl.integration import agent_loop
from rhyme_verl.integration.agent_loop import RhymeAgentLoopWorker
from rhyme_verl.integration.routed_client import running_answer
from rhyme_verl.telemetry.logs import LogOnce
from rhyme_verl.telemetry.trace import read_trace
from rhyme_verl.telemetry.trace_recorder import TrajectoryRecorder

pytestmark = pytest.mark.engine

SAMPLES = 2


class Lanes:
    """Grants every lane at once and notes what it is told; groups are published when the test says so."""

    def __init__(self):
        self.events = []
        self.publish = asyncio.Event()

    async def lane(self, answer):
        return GrantedLane(answer, None, 10.0)

    def finish(self, finished):
        self.events.append(finished)

    async def wait_until_published(self, uid, failed):
        self.events.append(("ended", uid, failed))
        await self.publish.wait()

    def abandon(self, uid):
        self.events.append(("abandoned", uid))

    def show(self, uid):
        self.events.append(("visible", uid))


def output(num_tokens):
    return SimpleNamespace(
        prompt_ids=[1, 2, 3],
        response_ids=[7] * num_tokens,
        response_mask=[1] * num_tokens,
        extra_fields={"min_global_steps": 4, "max_global_steps": 5},
    )


@pytest.fixture
def worker(monkeypatch):
    """A worker without verl's state; verl's methods run the samples of a prompt, sample 1 with `fails` fails."""

    async def run_prompt(self, prompt, sampling_params, trajectory, trace=False):
        if prompt.get("breaks"):
            raise RuntimeError("no agent loop of that name")
        runs = (
            self._run_agent_loop(sampling_params, trajectory, uid=prompt["uid"], session_id=sample, prompt=prompt)
            for sample in range(SAMPLES)
        )
        await asyncio.gather(*map(asyncio.create_task, runs), return_exceptions=True)

    async def run_agent_loop(self, sampling_params, trajectory, *, uid, session_id, prompt):
        assert running_answer.get().answer == (uid, session_id)
        if session_id == 1 and prompt.get("fails"):
            raise RuntimeError("the tool failed")
        await self._agent_loop_postprocess(output(5 + session_id), False, uid=uid, session_id=session_id)

    async def postprocess(self, output, validate, **kwargs):
        pass

    base = agent_loop._VerlWorker
    monkeypatch.setattr(base, "_run_prompt", run_prompt)
    monkeypatch.setattr(base, "_run_agent_loop", run_agent_loop)
    monkeypatch.setattr(base, "_agent_loop_postprocess", postprocess)
    subject = object.__new__(RhymeAgentLoopWorker)
    subject.rollout_config = SimpleNamespace(n=SAMPLES, val_kwargs=SimpleNamespace(n=1), response_length=6)
    subject._history = subject._recorder = None
    subject._epochs, subject._groups = {}, {}
    subject._log_once = LogOnce(agent_loop.logger)
    return subject


def play(worker, prompt, before_publication=lambda events: None):
    """Run a prompt to its end and return what the lanes were told."""

    async def scenario():
        worker._lanes = lanes = Lanes()
        running = asyncio.create_task(worker._run_prompt(prompt, {}, {"validate": False}))
        for _ in range(20):
            await asyncio.sleep(0)
        before_publication(lanes.events)
        assert running.done() == ("breaks" in prompt), "a group is not seen before it is published"
        lanes.publish.set()
        results = await asyncio.gather(running, return_exceptions=True)
        assert not worker._groups
        return lanes.events, results[0]

    return asyncio.run(scenario())


def test_a_group_is_seen_after_its_publication_and_lanes_are_free_before(worker):
    events, _ = play(worker, {"uid": "a"})
    assert events == [
        Finished(("a", 0), tokens=5, truncated=False, prompt_tokens=3, versions=(4, 5)),
        Finished(("a", 1), tokens=6, truncated=True, prompt_tokens=3, versions=(4, 5)),
        ("ended", "a", False),
        ("visible", "a"),
    ]


def test_a_failed_answer_frees_its_lane_and_its_group_ends_as_failed(worker):
    events, _ = play(worker, {"uid": "a", "fails": True})
    assert Finished(("a", 1), tokens=None) in events
    assert events[-2:] == [("ended", "a", True), ("visible", "a")]


def test_a_group_that_fails_before_its_answers_begin_is_abandoned(worker):
    events, error = play(worker, {"uid": "a", "breaks": True})
    assert events == [("abandoned", "a"), ("visible", "a")]
    assert isinstance(error, RuntimeError)


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

    monkeypatch.setattr(agent_loop._VerlWorker, "_compute_score", compute_score)
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
