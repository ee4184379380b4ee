"""The jobs of the end-to-end benchmark: workloads, and the ways in which each is run."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.engines.best_suffix import suffix_config
from benchmarks.jobs.job_figures import EPOCH_STEPS
from benchmarks.jobs.longtail_policy import MAX_ANSWER_TOKENS, SHIPPED_POLICY
from benchmarks.jobs.replica_job import ROLLOUT, SAMPLES, ReplicaJob
from examples.quickstart.policy import REPOSITORY
from examples.quickstart.problems import LONGTAIL, QUICKSTART, Task
from examples.quickstart.quickstart import FP32_TRAINER

REPLICAS = 2
LANES = 64
DRAFT_ROOM = 128  # model length beyond the longest answer in tokens, so that no draft is cut short
COMMON = (
    "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=16",
    f"{ROLLOUT}.log_prob_micro_batch_size_per_gpu=16",
    f"{ROLLOUT}.agent.num_workers=2",
    # A separate worker process would be a third, busy-waiting process on two cores.
    f"+{ROLLOUT}.engine_kwargs.vllm.distributed_executor_backend=uni",
    FP32_TRAINER,  # like the rollout, so that only a wrong log-prob makes a difference
)
GSM8K_POLICY = REPOSITORY / "benchmarks/policies/gsm8k-epoch3"
LEARNING_RATE = "actor_rollout_ref.actor.optim.lr=1e-4"  # the recipe's is for models a hundred times as large
NOISY_TEMPERATURE = 1.4  # the policy was sharpened by the reciprocal (gsm8k_policy.py)
NO_DRAFTS = f"+{ROLLOUT}.custom.rhyme.spec.enabled=false"
THRESHOLD = "trainer.v1.sampler.max_off_policy_threshold"
WAIT = "trainer.v1.sampler.max_off_policy_strategy=wait"


def batch_size(lanes: int) -> int:
    """Return the prompts of a step: as many answers as there are lanes."""
    return REPLICAS * lanes // SAMPLES


@dataclass(frozen=True, kw_only=True)
class RecipeJob(ReplicaJob):
    """The GSM8K recipe with `hardware=cpu`."""

    def base_arguments(self, out: Path) -> list[str]:
        arguments = [
            f"--config-path={REPOSITORY / 'recipes'}",
            "--config-name=gsm8k/gsm8k",
            "hardware=cpu",
            f"rhyme={'both' if self.rollout == 'rhyme' else 'baseline'}",
            f"hydra.run.dir={out / 'hydra'}",
            f"data.train_files={out / 'data/train.parquet'}",
            f"data.val_files={out / 'data/test.parquet'}",
            f"trainer.total_epochs={self.epochs}",
            f"trainer.default_local_dir={out / 'checkpoints'}",
            "trainer.logger=[console,file]",
        ]
        if self.rollout == "vllm":
            worker = "rhyme_verl.platforms.cpu_worker.CpuWorkerExtension"
            arguments.append(f"+{ROLLOUT}.engine_kwargs.vllm.worker_extension_cls={worker}")
        return arguments


@dataclass(frozen=True, kw_only=True)
class Workload:
    """What a job trains on.

    Attributes:
        trace: shipped trace of this kind of text, by which `suffix` is tuned.
        policy: folder of the initial policy.
        max_prompt_tokens, max_answer_tokens: largest lengths.
        task: kind of problems; None: GSM8K's questions.
        job: kind of job.
        overrides: additional verl (Hydra) overrides.
    """

    trace: str
    policy: Path
    max_prompt_tokens: int
    max_answer_tokens: int
    task: Task | None = None
    job: type[ReplicaJob] = ReplicaJob
    overrides: tuple[str, ...] = ()


WORKLOADS = {
    one.trace: one
    for one in (
        Workload(
            trace="longtail",
            policy=SHIPPED_POLICY,
            max_prompt_tokens=160,
            max_answer_tokens=MAX_ANSWER_TOKENS,
            task=LONGTAIL,
        ),
        Workload(
            trace="gsm8k-noisy",
            policy=GSM8K_POLICY,
            max_prompt_tokens=320,
            max_answer_tokens=400,
            overrides=(f"{ROLLOUT}.temperature={NOISY_TEMPERATURE}", LEARNING_RATE),
        ),
        Workload(
            trace="gsm8k",
            policy=GSM8K_POLICY,
            max_prompt_tokens=320,
            max_answer_tokens=400,
            job=RecipeJob,
            overrides=(LEARNING_RATE,),
        ),
    )
}


@dataclass(frozen=True, kw_only=True)
class Case:
    """One way to run the job.

    Attributes:
        mode: verl's trainer mode.
        rollout: `vllm` (stock) or `rhyme`.
        pipe: `pipe.max_age` for HistoPipe; None: verl's load balancer (see ReplicaJob).
        suffix: `speculative_config` of vLLM's `suffix` method; None: not used.
        replicas: number of replicas; one generates a batch in two waves.
        overrides: additional verl (Hydra) overrides.
    """

    mode: str
    rollout: str = "vllm"
    pipe: int | None = None
    suffix: dict[str, Any] | None = None
    replicas: int = REPLICAS
    overrides: tuple[str, ...] = ()

    def job(
        self,
        emulation: str,
        epochs: int,
        workload: Workload = WORKLOADS["longtail"],
        lanes: int = LANES,
        train_file: Path | None = None,
    ) -> ReplicaJob:
        """Return the job of this case; `train_file` has the questions of a workload without a task."""
        max_tokens = workload.max_prompt_tokens + workload.max_answer_tokens + DRAFT_ROOM
        lengths = (f"data.max_prompt_length={workload.max_prompt_tokens}", f"+{ROLLOUT}.max_model_len={max_tokens}")
        return workload.job(
            mode=self.mode,
            rollout=self.rollout,
            pipe=self.pipe,
            replicas=self.replicas,
            lanes=lanes,
            batch_size=batch_size(lanes),
            epochs=epochs,
            num_problems=EPOCH_STEPS * batch_size(lanes),
            task=workload.task or QUICKSTART,  # of the validation problems
            train_file=train_file,
            policy=workload.policy,
            max_response_tokens=workload.max_answer_tokens,
            emulation=emulation,
            overrides=(*COMMON, *lengths, *workload.overrides, *self.overrides, *self._suffix_arguments()),
        )

    def _suffix_arguments(self) -> tuple[str, ...]:
        """Return the overrides that turn vLLM's `suffix` on, if this case has it."""
        if self.suffix is None:
            return ()
        text = ",".join(f"{name}:{value}" for name, value in self.suffix.items())
        return (f"+{ROLLOUT}.engine_kwargs.vllm.speculative_config={{{text}}}",)


def suffix_rows(lanes: int) -> dict[str, int]:
    """Return at how many sequences the replay has to find the best `suffix` settings, by the first word of a case.

    It is about how many stock's engines run in the mean: in `sync`, all lanes begin together and drain (14 of 64 with
    the long-tail policy); in `colocate_async`, most are always in use (57).
    """
    return {"sync": lanes // 4, "colocate": lanes}


def cases(best: dict[str, dict[str, Any]]) -> dict[str, Case]:
    """Return all cases by name; `best`: `speculative_config` of `suffix` with its best settings, as `suffix_rows`."""
    found: dict[str, Case] = {}
    for mode, name, max_age in (("sync", "sync", 0), ("colocate_async", "colocate", 2)):
        stock = Case(mode=mode)
        found |= {
            f"{name} stock": stock,
            f"{name} suffix": replace(stock, suffix=suffix_config({})),
            f"{name} suffix best": replace(stock, suffix=best.get(name)),
            f"{name} histospec": Case(mode=mode, rollout="rhyme"),
            f"{name} histopipe": Case(mode=mode, rollout="rhyme", pipe=max_age, overrides=(NO_DRAFTS,)),
            f"{name} rhyme": Case(mode=mode, rollout="rhyme", pipe=max_age),
        }
    for name in ("sync histospec", "sync rhyme"):
        found[f"{name}, 1 replica"] = replace(found[name], replicas=1)
    found["colocate rhyme, max_age 3"] = replace(found["colocate rhyme"], pipe=3)  # stock's answers become older
    for threshold in (2, 3):
        waiting = (WAIT, f"{THRESHOLD}={threshold}")
        found[f"colocate wait {threshold}"] = Case(mode="colocate_async", overrides=waiting)
    waiting = (WAIT, f"{THRESHOLD}=3")  # answers are at most 2 steps old
    found["separate stock"] = Case(mode="separate_async", overrides=waiting)
    found["separate rhyme"] = Case(mode="separate_async", rollout="rhyme", pipe=2, overrides=waiting)
    return found
