"""rhyme's metrics: how a step's are made from its replicas', and how they reach verl's trainer."""

import asyncio
import math
import time
from types import SimpleNamespace

import pytest
import ray
from prometheus_client import REGISTRY, generate_latest

from rhyme_verl.integration import plugin
from rhyme_verl.telemetry.prometheus import ReplicaMetrics
from rhyme_verl.telemetry.step_metrics import MetricsReporter, StepMetrics

FIRST = {
    "busy_seconds": 2.0,
    "answers": 4,
    "tokens": 100,
    "num_steps": 60,
    "num_generated_tokens": 100,
    "num_drafts": 10,
    "num_draft_tokens": 80,
    "num_accepted_tokens": 40,
    "saved_seconds": 1.5,
    "history_tokens": 1000,
    "history_bytes": 20_000,
    "history_store_tokens": 1600,
    "history_store_bytes": 9000,
    "history_store_evicted_tokens": 0,
}
SECOND = FIRST | {
    "busy_seconds": 4.0,
    "tokens": 300,
    "num_generated_tokens": 300,
    "num_drafts": 30,
    "num_draft_tokens": 120,
    "num_accepted_tokens": 60,
    "saved_seconds": -0.5,
    "history_tokens": 600,
    "history_bytes": 12_000,
}


def test_counts_are_summed_over_replicas_and_rates_are_quotients_of_the_sums():
    metrics = StepMetrics()
    metrics.add_rollout(0, FIRST)
    metrics.add_rollout(1, SECOND)
    assert metrics.take() == {
        "rhyme/rollout/tokens": 400,
        "rhyme/rollout/answers": 8,
        "rhyme/rollout/busy_s": 4.0,
        "rhyme/rollout/replicas": 2,
        "rhyme/rollout/tokens_per_s": 100.0,
        "rhyme/spec/draft_tokens": 200,
        "rhyme/spec/accepted_tokens": 100,
        "rhyme/spec/accepted_per_verify": 2.5,
        "rhyme/spec/acceptance_rate": 0.5,
        "rhyme/spec/accepted_share": 0.25,
        "rhyme/spec/time_saved_s": 1.0,
        "rhyme/spec/engines_off": 0,
        "rhyme/history/tokens": 1600,
        "rhyme/history/bytes": 9000,
        "rhyme/history/evicted_tokens": 0,
        "rhyme/history/replica_tokens": 800,
        "rhyme/history/replica_bytes": 16_000,
    }
    assert metrics.take() == {}, "everything is logged once"


def test_a_drafter_that_has_failed_is_told_at_every_step():
    metrics = StepMetrics()
    for _ in range(2):
        metrics.add_rollout(0, FIRST | {"drafting_off": 1.0})
        metrics.add_rollout(0, FIRST | {"drafting_off": 1.0})
        metrics.add_rollout(1, SECOND | {"drafting_off": 0.0})
        assert metrics.take()["rhyme/spec/engines_off"] == 1


def test_several_rollouts_of_one_replica_in_a_step_are_one():
    metrics = StepMetrics()
    metrics.add_rollout(0, FIRST)
    metrics.add_rollout(0, SECOND)
    taken = metrics.take()
    assert taken["rhyme/rollout/replicas"] == 1
    assert taken["rhyme/rollout/busy_s"] == 6.0
    assert taken["rhyme/spec/draft_tokens"] == 200
    assert taken["rhyme/history/replica_tokens"] == 600, "a size is not a sum"


def test_without_drafting_there_are_no_rates_and_nothing_divides_by_zero():
    metrics = StepMetrics()
    metrics.add_rollout(0, {"busy_seconds": 1.0, "answers": 1, "tokens": 5})
    assert not any("spec" in name or "history" in name for name in metrics.take())
    metrics.add_rollout(0, FIRST | {"num_drafts": 0, "num_draft_tokens": 0, "num_accepted_tokens": 0})
    taken = metrics.take()
    assert taken["rhyme/spec/draft_tokens"] == 0
    assert "rhyme/spec/acceptance_rate" not in taken


def test_other_parts_report_finished_values_and_the_latest_counts():
    metrics = StepMetrics()
    metrics.report({"pipe/bubble": 0.5, "pipe/steals": 2, "pipe/predictor_rank_correlation": math.nan})
    metrics.report({"pipe/bubble": 0.25})
    assert metrics.take() == {"rhyme/pipe/bubble": 0.25, "rhyme/pipe/steals": 2.0}


def test_vllms_metrics_page_shows_a_replicas_counters():
    replica = ReplicaMetrics(7)
    replica.add(FIRST)
    replica.add(SECOND)
    replica.add(SECOND | {"num_draft_tokens": -5})  # its engine was started anew
    page = generate_latest(REGISTRY).decode()
    assert 'rhyme_draft_tokens_total{replica="7"} 200.0' in page
    assert 'rhyme_history_tokens{replica="7"} 600.0' in page


@pytest.fixture(scope="module")
def cluster():
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_prestart_worker_first_driver", "0")
        ray.init("local", num_cpus=1, include_dashboard=False, log_to_driver=False)
        yield
        ray.shutdown()


class Trainer:
    global_steps, total_training_steps = 1, 10

    """The part of verl's trainer that is wrapped; tests/jobs/test_end_to_end.py has the real one."""

    def _consume_sync_metrics(self):
        return {"delta/changed": 1.0}


def test_a_trainer_takes_what_was_reported_and_survives_its_loss(cluster, caplog):
    plugin._log_metrics(SimpleNamespace(PPOTrainer=Trainer))
    plugin._log_metrics(SimpleNamespace(PPOTrainer=Trainer))  # once is enough
    trainer, own = Trainer(), {"delta/changed": 1.0}
    assert trainer._consume_sync_metrics() == own, "nobody has reported"
    reporter = MetricsReporter()
    reporter.start()
    started = ray.get_actor("rhyme_metrics")  # by the replica, before its first report
    ray.get(started.__ray_ready__.remote())  # reports to an actor that is slow to start are dropped, as they should be
    reporter.report({"pipe/bubble": 0.125})
    asyncio.run(reporter.add_rollout(0, {"answers": 1, "tokens": 10, "busy_seconds": 2.0}))
    taken = trainer._consume_sync_metrics()
    assert taken["delta/changed"] == 1.0
    assert taken["rhyme/pipe/bubble"] == 0.125
    assert taken["rhyme/rollout/tokens_per_s"] == 5.0
    assert trainer._consume_sync_metrics() == own

    ray.kill(ray.get_actor("rhyme_metrics"), no_restart=True)
    assert trainer._consume_sync_metrics() == own
    asyncio.run(reporter.add_rollout(0, {"answers": 1, "tokens": 10, "busy_seconds": 2.0}))  # is lost
    reporter.report({"pipe/bubble": 0.5})  # starts another actor
    while not (taken := trainer._consume_sync_metrics()).keys() - own:
        time.sleep(0.05)
    assert taken == own | {"rhyme/pipe/bubble": 0.5}
    assert len([line for line in caplog.messages if "metrics of a step are missing" in line]) <= 2, "once in each"


def test_a_trainer_without_the_wrapped_method_is_left_alone_and_that_is_said(caplog):
    class Other:
        pass

    plugin._log_metrics(SimpleNamespace(PPOTrainer=Other))
    assert "will not reach its trackers" in caplog.text
