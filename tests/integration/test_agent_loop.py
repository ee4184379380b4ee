"""What the agent-loop manager passes on to its workers, through verl's own code; whole jobs are in tests/jobs."""

import asyncio
from collections import Counter
from types import SimpleNamespace

import numpy as np
import pytest
from verl.trainer.ppo.v1 import agent_loop_tq
from verl.utils import tensordict_utils

from rhyme_verl.config import RhymeConfig, TraceConfig
from rhyme_verl.integration import agent_loop, agent_loop_worker
from rhyme_verl.integration.agent_loop import RhymeAgentLoopManager, digest_of
from rhyme_verl.integration.agent_loop_worker import RhymeAgentLoopWorker
from rhyme_verl.telemetry.trace import TrajectoryRecorder

pytestmark = pytest.mark.engine

SAMPLING = SimpleNamespace(temperature=1.0, top_p=1.0, top_k=-1)
ROLLOUT = SimpleNamespace(
    **vars(SAMPLING), calculate_log_probs=True, val_kwargs=SAMPLING, agent=SimpleNamespace(default_agent_loop="one")
)


def worker_with(recorder):
    worker = object.__new__(RhymeAgentLoopWorker)
    worker.config = SimpleNamespace(actor_rollout_ref=SimpleNamespace(rollout=ROLLOUT))
    worker.background_tasks, worker._lanes, worker._recorder = set(), None, recorder
    return worker


def manager_of(workers):
    manager = object.__new__(RhymeAgentLoopManager)
    manager._router, manager._num_rollouts = None, Counter()
    manager._rhyme = RhymeConfig(trace=TraceConfig(path="/somewhere"))
    manager.agent_loop_workers = [
        SimpleNamespace(generate_sequences=SimpleNamespace(remote=worker.generate_sequences)) for worker in workers
    ]
    return manager


def batch_of(uids, questions, **named):
    prompts = np.empty(len(questions), dtype=object)
    prompts[:] = [[{"role": "user", "content": question}] for question in questions]
    batch = tensordict_utils.get_tensordict(
        {"uid": np.array(list(uids), dtype=object), "raw_prompt": prompts, "index": np.arange(len(uids)).astype(object)}
    )
    for name, value in {"global_steps": 1, **named}.items():
        tensordict_utils.assign_non_tensor_data(batch, name, value)
    return batch


def test_the_trace_knows_how_often_a_prompt_was_dispatched_for_training(tmp_path, monkeypatch):
    seen, calls = {}, []

    async def run_prompt(self, prompt, sampling_params, trajectory, trace=False):
        seen[prompt["uid"]] = *self._recorder._groups[prompt["uid"]], sorted(prompt)

    monkeypatch.setattr(agent_loop_worker._VerlWorker, "_run_prompt", run_prompt)
    monkeypatch.setattr(agent_loop_tq.ray, "get", calls.extend)
    workers = [worker_with(TrajectoryRecorder(str(tmp_path))) for _ in range(2)]

    async def play():
        manager = manager_of(workers)
        manager.generate_sequences(batch_of("abc", ["1+1?", "2+2?", "3+3?"]))
        manager.generate_sequences(batch_of("de", ["3+3?", "4+4?"]))
        manager.generate_sequences(batch_of("vw", ["3+3?", "5+5?"], validate=True))
        manager.generate_sequences(batch_of("fg", ["3+3?", "3+3?"]))
        await asyncio.gather(*calls)
        await asyncio.gather(*(task for worker in workers for task in worker.background_tasks))

    asyncio.run(play())
    assert {uid: (epoch, validate) for uid, (epoch, validate, _) in seen.items()} == {
        "a": (1, False), "b": (1, False), "c": (1, False), "d": (2, False), "e": (1, False), "v": (0, True),
        "w": (0, True), "f": (4, False), "g": (4, False),
    }  # fmt: skip
    fields = ["agent_name", "global_steps", "index", "raw_prompt", "uid"]
    assert all(names == fields for *_, names in seen.values()), "verl sees nothing of it"


def test_a_step_is_reported_when_the_next_one_is_submitted_and_not_with_replacements(monkeypatch):
    """verl submits a step's batch, and then groups for those that it has filtered."""
    told, waiting = [], []

    def submit(groups, validate):
        waiting.append({"step": groups[0].step, "answers": len(groups)})
        return True

    def metrics():
        reports, waiting[:-1] = waiting[:-1], []
        return reports

    monkeypatch.setattr(agent_loop.ray, "get", lambda value: value)
    monkeypatch.setattr(agent_loop, "num_samples", lambda *_: 1)
    manager = manager_of([])
    manager.rollout_config, manager._reported_step = None, None
    manager._router = SimpleNamespace(submit=SimpleNamespace(remote=submit), metrics=SimpleNamespace(remote=metrics))
    manager._metrics = SimpleNamespace(report=told.append)
    for step, uids in ((1, "abcd"), (1, "ef"), (1, "g"), (2, "hijk"), (2, "l")):
        assert manager._submit(batch_of(uids, uids, global_steps=step), list(uids), [0] * len(uids), False)
    assert told == [{"pipe/answers": 4}, {"pipe/answers": 2}, {"pipe/answers": 1}], "all of step 1, with step 2"
    assert [report["answers"] for report in waiting] == [4, 1]


def test_a_prompt_is_the_same_prompt_in_every_epoch_however_it_is_held():
    messages = [{"role": "user", "content": "How many?"}]
    assert digest_of(messages) == digest_of(np.array([{"content": "How many?", "role": "user"}], dtype=object))
    assert digest_of(messages) != digest_of([{"role": "user", "content": "How much?"}])
    nested = [[{"role": "user", "content": np.array([{"text": word}], dtype=object)}] for word in ("a", "a", "b")]
    assert digest_of(nested[0]) == digest_of(nested[1]) != digest_of(nested[2])
    assert digest_of([{"role": "user", 1: "a"}]) == digest_of([{"role": "user", 1: "a"}])


def test_images_are_known_by_what_they_show():
    image = pytest.importorskip("PIL.Image")

    def asked(colour, size=4, spot=0):
        picture = image.new("RGB", (size, size), colour)
        picture.paste("green", (0, 0, spot, spot))
        content = [
            {"type": "image", "image": picture},
            {"type": "text", "text": "What is it?"},
        ]
        return [{"role": "user", "content": content}]

    assert digest_of(asked("red")) == digest_of(asked("red")) != digest_of(asked("blue"))
    assert digest_of(asked("red", 1024, 16)) == digest_of(asked("red", 1024, 16)) != digest_of(asked("red", 1024))
