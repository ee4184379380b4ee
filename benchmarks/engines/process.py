"""Runs vLLM engines for measurements, one per process, all alive at the same time and used in turns.

Turns make the comparison fair on a machine whose speed drifts: methods run in the order A, B, C, then C, B, A, and so
on, with the same prompts. An idle engine only waits for its next command. All settings but the method are vLLM's
defaults or equal for all engines: the model length has space for one more draft (vLLM otherwise drafts zeros near the
end), and log statistics are on. Engines run on any device; the VLLM_CPU variables below affect vLLM's CPU build only.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from multiprocessing import get_context
from multiprocessing.connection import Connection
from types import TracebackType
from typing import Any

from rhyme_verl.config import SpecConfig
from rhyme_verl.histospec.engine_arguments import PROPOSER, speculative_config

WORKER = "benchmarks.engines.worker.BenchWorker"
PLANTED_PROPOSER = "benchmarks.drafting.planted_drafter.PlantedProposer"
ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",  # the number of threads per engine on rhyme's CPU platform
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
}
COUNTERS = {
    "vllm:spec_decode_num_drafts": "drafts",
    "vllm:spec_decode_num_draft_tokens": "drafted",
    "vllm:spec_decode_num_accepted_tokens": "accepted",
}
MAX_ROWS = 128

# Peers use the settings of their documentation; `suffix-64` uses ArcticInference's default tree depth.
METHODS: dict[str, dict[str, Any] | None] = {
    "none": None,
    "ngram": {"method": "ngram", "num_speculative_tokens": 5, "prompt_lookup_max": 4},
    "suffix": {"method": "suffix", "num_speculative_tokens": 32},
    "suffix-64": {"method": "suffix", "num_speculative_tokens": 32, "suffix_decoding_max_tree_depth": 64},
    "rhyme": speculative_config(SpecConfig().max_draft_tokens),
}


@dataclass(frozen=True, kw_only=True)
class EngineSettings:
    """The settings that an engine process starts with."""

    model: str
    max_model_len: int
    speculative: dict[str, Any] | None = None
    rhyme: dict[str, Any] = field(default_factory=dict)  # settings under custom.rhyme
    arguments: dict[str, Any] = field(default_factory=dict)  # arguments of vllm.LLM, equal for all engines
    emulated_model: str = ""  # model whose published step times are emulated (emulated_clock.py); empty: none
    separate_process: bool = False  # run vLLM's engine core in a separate process


@dataclass(frozen=True, kw_only=True)
class Load:
    """The requests of one run.

    Attributes:
        prompts: token ids of each request's prompt, in the order of submission.
        concurrency: maximum number of requests in the engine; the next one enters when one has finished.
        max_tokens: maximum tokens per answer.
        ignore_eos: whether every answer is `max_tokens` long.
        remember: whether the worker receives the finished answers after the run (not timed), as from rhyme's server.
        log_probs: whether to request each token's log-probability, as verl does.
        only_token: the only token that may be sampled; None: all.
        dilation: dilation of the emulated clock in this run; reported seconds are divided by it. None: not emulated.
    """

    prompts: Sequence[Sequence[int]]
    concurrency: int
    max_tokens: int
    temperature: float = 1.0
    ignore_eos: bool = False
    remember: bool = False
    log_probs: bool = False
    only_token: int | None = None
    dilation: float | None = None


class Engine:
    """One engine in its own process, used as a context manager. Calls block until the engine answers."""

    def __init__(self, settings: EngineSettings) -> None:
        context = get_context("spawn")
        self._connection, far_end = context.Pipe()
        self._process = context.Process(target=_serve, args=(settings, far_end))
        self._process.start()
        far_end.close()

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._connection.close()
        self._process.join(30)
        if self._process.is_alive():
            self._process.kill()

    def wait_until_ready(self) -> None:
        self._answer()

    def worker(self, method: str, *args: Any) -> Any:
        """Call a method of the worker extension and return the first rank's result."""
        self._connection.send(("worker", (method, args)))
        return self._answer()

    def generate(self, load: Load) -> dict[str, float]:
        """Run a load; returns its seconds, tokens, tokens_per_s, and drafts, drafted and accepted tokens.

        For an emulated engine, seconds are the accelerator's. `late_step_share` and `late_time_share` are the shares of
        steps and of time by which the CPU was too slow.
        """
        self._connection.send(("generate", (load,)))
        return self._answer()

    def _answer(self) -> Any:
        try:
            return self._connection.recv()
        except EOFError:
            raise RuntimeError("an engine process died: see its messages above") from None


def start_all(settings: dict[str, EngineSettings]) -> tuple[ExitStack, dict[str, Engine]]:
    """Start an engine per name, one after another. Closing the stack ends them."""
    stack = ExitStack()
    engines = {}
    for name, one in settings.items():
        engines[name] = stack.enter_context(Engine(one))
        engines[name].wait_until_ready()
    return stack, engines


def _serve(settings: EngineSettings, connection: Connection) -> None:
    os.environ.update(ENVIRONMENT, VLLM_ENABLE_V1_MULTIPROCESSING=str(int(settings.separate_process)))
    llm = _build(settings)
    connection.send("ready")
    actions: dict[str, Callable[..., Any]] = {
        "worker": lambda method, args: llm.collective_rpc(method, args=args)[0],
        "generate": lambda load: _generate(llm, load),
    }
    while True:
        try:
            action, arguments = connection.recv()
        except EOFError:
            llm.llm_engine.engine_core.shutdown()
            sys.stderr.flush()
            os._exit(0)  # a regular exit only prints what Triton's bindings leak
        connection.send(actions[action](*arguments))


def _build(settings: EngineSettings) -> Any:
    from vllm import LLM

    arguments: dict[str, Any] = {
        "max_num_seqs": MAX_ROWS,
        "disable_log_stats": False,
        "seed": 7,
        "use_tqdm_on_load": False,
    }
    if settings.speculative is not None:
        arguments["speculative_config"] = dict(settings.speculative)
    llm = LLM(
        model=settings.model,
        max_model_len=settings.max_model_len,
        worker_extension_cls=WORKER,
        additional_config={"rhyme": settings.rhyme},
        **arguments | settings.arguments,
    )
    if settings.emulated_model:
        llm.collective_rpc("bench_emulate", args=(settings.emulated_model,))
    if settings.speculative is not None and not all(llm.collective_rpc("bench_samples_exactly")):
        raise RuntimeError("vLLM's CPU build samples drafted rows wrongly: rhyme's fix is not active")
    if settings.speculative is not None and settings.speculative.get("model") in (PROPOSER, PLANTED_PROPOSER):
        assert llm.collective_rpc("rhyme_bind") == [True]
    return llm


def _generate(llm: Any, load: Load) -> dict[str, float]:
    from vllm import SamplingParams, TokensPrompt
    from vllm.sampling_params import RequestOutputKind

    parameters = SamplingParams(
        temperature=load.temperature,
        max_tokens=load.max_tokens,
        ignore_eos=load.ignore_eos,
        logprobs=0 if load.log_probs else None,
        allowed_token_ids=None if load.only_token is None else [load.only_token],
        detokenize=False,  # RL uses token ids
        output_kind=RequestOutputKind.FINAL_ONLY,
    )
    llm.reset_prefix_cache()
    llm.collective_rpc("bench_pace", args=(load.dilation,))
    engine = llm.llm_engine
    before = _counters(llm)
    answers: dict[str, list[int]] = {}
    submitted = 0
    started = time.perf_counter()
    while len(answers) < len(load.prompts):
        while submitted < len(load.prompts) and submitted - len(answers) < load.concurrency:
            prompt = TokensPrompt(prompt_token_ids=list(load.prompts[submitted]))
            engine.add_request(f"{started}-{submitted}", prompt, parameters)
            submitted += 1
        for output in engine.step():
            if output.finished:
                answers[output.request_id] = list(output.outputs[0].token_ids)
    seconds = (time.perf_counter() - started) / (load.dilation or 1.0)
    tokens = sum(map(len, answers.values()))
    late = llm.collective_rpc("bench_late_shares")[0] if load.dilation else {}
    if load.remember:
        finished = [(prompt, answers[f"{started}-{index}"]) for index, prompt in enumerate(load.prompts)]
        llm.collective_rpc("bench_finished", args=(finished,))
    counts = {name: after - before[name] for name, after in _counters(llm).items()}
    return {"seconds": seconds, "tokens": tokens, "tokens_per_s": tokens / seconds, **counts, **late}


def _counters(llm: Any) -> dict[str, float]:
    values = dict.fromkeys(COUNTERS.values(), 0.0)
    for metric in llm.get_metrics():
        if metric.name in COUNTERS:
            values[COUNTERS[metric.name]] += metric.value
    return values
