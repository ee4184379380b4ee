"""The examples do what their texts say, as far as that needs no engine."""

import asyncio
import json
import os
import subprocess
from pathlib import Path

import numpy as np
from hydra import compose, initialize_config_module
from rhyme_verl._core import prompt_key

from examples.quickstart.policy import SHIPPED_POLICY
from examples.replay_trace import replay
from recipes.check import check
from rhyme_verl.config import RhymeConfig
from rhyme_verl.histospec.from_config import make_index

EXAMPLES = Path(__file__).parents[2] / "examples"


def arguments_of(script):
    """The Hydra overrides that a job's script would start verl with."""
    shown = subprocess.run(
        ["bash", str(script)], env={**os.environ, "PYTHON": "echo"}, capture_output=True, text=True, check=True
    )
    module, *overrides = shown.stdout.split()[1:]
    assert module == "verl.trainer.main_ppo"
    return overrides


def test_a_job_is_switched_over_by_one_key_and_passes_all_checks():
    before, after = (arguments_of(EXAMPLES / f"switch_over/{name}.sh") for name in ("before", "after"))
    assert set(before) - set(after) == {"actor_rollout_ref.rollout.name=vllm"}
    assert set(after) - set(before) == {"actor_rollout_ref.rollout.name=rhyme"}
    readme = (EXAMPLES / "switch_over/README.md").read_text(encoding="utf-8")
    assert all(f"{sign}  {key}" in readme for sign, keys in (("-", set(before) - set(after)),) for key in keys)
    assert all(f"+  {key}" in readme for key in set(after) - set(before))
    with initialize_config_module("verl.trainer.config", version_base=None):
        check(compose("ppo_trainer", overrides=after))


def test_the_tool_answers_the_last_sum_of_an_answer():
    from transformers import AutoTokenizer

    from examples.tool_agent.calculator import LastSumParser, calculate

    tokenizer = AutoTokenizer.from_pretrained(SHIPPED_POLICY)
    text = "Anna has 12 + 30 = 42 apples.\nThen she has 42 / 6 = 8 apples.\n#### 8"
    content, calls = asyncio.run(LastSumParser(tokenizer).extract_tool_calls(tokenizer.encode(text)))
    assert content == text
    (call,) = calls
    assert (call.name, json.loads(call.arguments)) == ("calculate", {"expression": "42 / 6"})
    assert calculate("42 / 6") == "42 / 6 = 7"
    assert calculate("5 / 0") == "5 / 0 = 0"
    assert asyncio.run(LastSumParser(tokenizer).extract_tool_calls(tokenizer.encode("#### 8"))) == ("#### 8", [])


def test_the_server_remembers_what_the_client_sends():
    from examples.standalone.client import as_history

    prompt = np.array([5, 6, 7], np.int32)
    batch = as_history(prompt, [np.array([8, 9, 2], np.int32), np.array([8, 2], np.int32)], turn=3)
    index = make_index(RhymeConfig())
    index.update(prompt_key(prompt), batch.tokens, batch.lengths, batch.rollouts, batch.ids)
    counts = index.stats()
    assert (counts.num_prompts, counts.num_answers, counts.num_tokens) == (1, 2, 5)


def test_a_replayed_trace_is_drafted_better_with_every_epoch_of_history(capsys):
    replay.main(trace=replay.RECORDED, concurrency=16, max_draft_tokens=24, min_acceptance=0.05)
    rows = [line.split("│")[1:-1] for line in capsys.readouterr().out.splitlines() if line.startswith("│")]
    accepted = [float(cells[3]) for cells in rows]
    assert len(accepted) == 6
    assert accepted == sorted(accepted) and accepted[1] > 2 * accepted[0]
