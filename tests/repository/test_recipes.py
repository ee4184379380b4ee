"""Every recipe composes and passes verl's and rhyme's own checks; its data preparation writes what verl reads."""

import json
import os
import re

import pytest

from recipes.check import HARDWARE, RECIPES, RHYME, ROOT, check, compose_recipe
from recipes.dapo import prepare_data as dapo_data
from recipes.gsm8k import prepare_data as gsm8k_data
from rhyme_verl.config import load_config


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("hardware", HARDWARE)
def test_a_recipe_passes_all_checks(recipe, hardware):
    config = compose_recipe(recipe, [f"hardware={hardware}"])
    check(config)
    assert config.actor_rollout_ref.rollout.name == "rhyme"
    assert config.trainer.v1.trainer_mode in HARDWARE[hardware]


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize(
    "overrides",
    [["hardware=node_async"], ["hardware=cluster_async"], ["hardware=cpu", "trainer.v1.trainer_mode=colocate_async"]],
    ids=" ".join,
)
def test_both_tiers_of_histopipe_run_with_a_maximum_age_of_two(recipe, overrides):
    config = compose_recipe(recipe, overrides)
    check(config)
    assert config.trainer.v1.trainer_mode == "colocate_async"
    assert load_config(config.actor_rollout_ref.rollout.custom.rhyme).pipe.max_age == 2
    assert config.trainer.v1.colocate_async.num_warmup_batches == 2
    assert config.actor_rollout_ref.rollout.router_config_path.endswith("histopipe/router.yaml")
    assert config.actor_rollout_ref.hybrid_engine


def test_every_script_runs_a_recipe_on_hardware_that_is_checked():
    scripts = sorted(ROOT.glob("*/*.sh"))
    assert len(scripts) == 4 * len(RECIPES)
    for script in scripts:
        text = script.read_text(encoding="utf-8")
        assert f"--config-name={script.parent.name}/{script.parent.name} " in text
        assert re.search(r" hardware=(\w+)", text).group(1) in HARDWARE


def test_the_checks_see_what_verl_and_rhyme_would_refuse():
    wrong = {
        "actor_rollout_ref.actor.ppo_mini_batch_size=128": "parameter_sync_step",
        "actor_rollout_ref.rollout.checkpoint_engine.backend=naive": "nccl",
        "+actor_rollout_ref.rollout.custom.rhyme.spec.max_draft_token=3": "max_draft_token",
        "actor_rollout_ref.rollout.router_config_path=nowhere/router.yaml": "nowhere/router.yaml",
    }
    for override, complaint in wrong.items():
        with pytest.raises((ValueError, AssertionError, OSError), match=complaint):
            check(compose_recipe("gsm8k", ["hardware=cluster", override]))
    with pytest.raises(AssertionError, match="overlong"):
        check(compose_recipe("dapo", ["hardware=cpu", "reward.reward_kwargs.overlong_buffer_cfg.len=4096"]))


@pytest.mark.parametrize("recipe", RECIPES)
def test_the_baseline_is_verl_alone_and_differs_in_the_rollout_only(recipe):
    ours, baseline = compose_recipe(recipe, []), compose_recipe(recipe, ["rhyme=baseline"])
    assert "rhyme_verl" not in str(baseline.actor_rollout_ref)
    assert baseline.actor_rollout_ref.rollout.name == "vllm"
    del ours.actor_rollout_ref.rollout, baseline.actor_rollout_ref.rollout
    for config in (ours, baseline):
        del config.variant, config.trainer.experiment_name, config.trainer.default_local_dir
    assert ours == baseline


@pytest.mark.parametrize("recipe", RECIPES)
def test_no_variant_resumes_another(recipe):
    folders = [
        compose_recipe(recipe, [f"rhyme={rhyme}", f"hardware={hardware}"]).trainer.default_local_dir
        for rhyme in RHYME
        for hardware in HARDWARE
    ]
    assert len(set(folders)) == len(folders) and all(map(os.path.isabs, folders))


def test_dapo_keeps_every_trait_of_dapo():
    config = compose_recipe("dapo", [])
    actor = config.actor_rollout_ref.actor
    assert (actor.clip_ratio_low, actor.clip_ratio_high) == (0.2, 0.28)
    assert actor.loss_agg_mode == "token-mean"
    assert (config.algorithm.filter_groups.enable, config.algorithm.filter_groups.metric) == (True, "acc")
    assert not actor.use_kl_loss and not config.algorithm.use_kl_in_reward
    overlong = config.reward.reward_kwargs.overlong_buffer_cfg
    assert overlong.enable and config.reward.reward_manager.name == "dapo"
    assert config.reward.reward_kwargs.max_resp_len == config.data.max_response_length == overlong.len + 16384


def test_gsm8k_rows_are_scored_by_verls_reward(tmp_path):
    parquet = pytest.importorskip("pyarrow.parquet")
    from verl.utils.reward_score import default_compute_score

    worked = "He pays 3 * 500 = <<3*500=1500>>1,500 dollars.\n#### 1,500"
    for split, count in (("train", 3), ("test", 1)):
        line = json.dumps({"question": "How much does he pay?", "answer": worked})
        (tmp_path / f"{split}.jsonl").write_text("\n".join([line] * count), encoding="utf-8")
    gsm8k_data.main(out=tmp_path / "out", local=tmp_path, max_train=2)
    rows = parquet.read_table(tmp_path / "out/train.parquet").to_pylist()
    assert len(rows) == 2 and parquet.read_table(tmp_path / "out/test.parquet").num_rows == 1
    row = rows[1]
    assert row["prompt"] == [{"role": "user", "content": f"How much does he pay? {gsm8k_data.INSTRUCTION}"}]
    assert row["extra_info"] == {"split": "train", "index": 1, "question": "How much does he pay?", "answer": worked}
    truth = row["reward_model"]["ground_truth"]
    assert truth == "1500"
    assert default_compute_score(row["data_source"], worked, truth) == 1.0
    with pytest.raises(ValueError, match="no '#### <number>'"):
        gsm8k_data.final_answer("no idea")


def test_dapo_problems_come_once_each(tmp_path):
    parquet = pytest.importorskip("pyarrow.parquet")

    def problem(text, truth):
        return {
            "data_source": "math_dapo",
            "prompt": [{"role": "user", "content": text}],
            "ability": "MATH",
            "reward_model": {"style": "rule-lighteval/MATH_v2", "ground_truth": truth},
            "extra_info": {"index": "9a9b6eb4"},
        }

    published = [problem("1 + 1", "2"), problem("2 + 2", "4"), problem("1 + 1", "2")]
    (tmp_path / "problems.jsonl").write_text("\n".join(map(json.dumps, published)), encoding="utf-8")
    dapo_data.main(out=tmp_path / "out", train=tmp_path / "problems.jsonl", test=tmp_path / "problems.jsonl")
    rows = parquet.read_table(tmp_path / "out/train.parquet").to_pylist()
    assert [row["prompt"] for row in rows] == [published[0]["prompt"], published[1]["prompt"]]
    assert [row["extra_info"] for row in rows] == [{"index": 0, "split": "train"}, {"index": 1, "split": "train"}]
    (tmp_path / "other.jsonl").write_text(json.dumps({"prompt": []}), encoding="utf-8")
    with pytest.raises(ValueError, match="other.jsonl: column data_source is missing"):
        dapo_data.load("train", tmp_path / "other.jsonl")
