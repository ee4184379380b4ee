"""Runs vLLM engines for measurements, one per process, all alive at the same time and used in turns.

Turns make the comparison fair on a machine whose speed drifts: methods run in the order A, B, C, then C, B, A, and so
on, with the same prompts. An idle engine only waits for its next command. All settings but the method are vLLM's
defaults or equal for all engines: the model length has space for one more draft (vLLM otherwise drafts zeros near the
end), and log statistics are on. Engines run on any device; the VLLM_CPU variables below affect vLLM's CPU build only,
which an engine in virtual time (virtual_time.py) needs.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from multiprocessing import get_context
from multiprocessing.connection import Connection
from types import TracebackType
from typing import Any

from rhyme_verl.config import SpecConfig
from rhyme_verl.histospec.engine_arguments import PROPOSER, speculative_config

WORKER = "benchmarks.engines.worker.BenchWorker"
ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",  # the number of threads per engine on rhyme's CPU platform
    "NUMBA_NUM_THREADS": "1",  # as many as vLLM's ngram uses; it would set PyTorch's number of threads to numba's
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
RECORDED_ANSWER = "recorded_answer"  # key of `SamplingParams.extra_args`: index of the answer that a request gets
MAX_ROWS = 128

# Peers use the settings of their documentation. All schedule asynchronously where vLLM does so, except for `rhyme-sync`
# (SETTINGS).
METHODS: dict[str, dict[str, Any] | None] = {
    "none": None,
    "ngram": {"method": "ngram", "num_speculative_tokens": 5, "prompt_lookup_max": 4},
    "suffix": {"method": "suffix", "num_speculative_tokens": 32},
    "rhyme": speculative_config(SpecConfig().max_draft_tokens),
    "rhyme-sync": speculative_config(SpecConfig().max_draft_tokens),
}
SETTINGS: dict[str, dict[str, Any]] = {"rhyme-sync": {"spec": {"async_scheduling": "off"}}}  # rhyme's, by method


@dataclass(frozen=True, kw_only=True)
class EngineSettings:
    """The settings that an engine process starts with."""

    model: str
    max_model_len: int
    speculative: dict[str, Any] | None = None
    rhyme: dict[str, Any] = field(default_factory=dict)  # settings under custom.rhyme
    arguments: dict[str, Any] = field(default_factory=dict)  # arguments of vllm.LLM, equal for all engines
    emulated_model: str = ""  # model whose published step times are emulated (emulated_clock.py); empty: none
    virtual_model: str = ""  # model whose published step times an engine in virtual time takes; empty: real time
    separate_process: bool = False  # run vLLM's engine core in a separate process


@dataclass(frozen=True, kw_only=True)
class Load:
    """The requests of one run.

    Attributes:
        prompts: token ids of each request's prompt, in the order of submission.
        concurrency: maximum number of requests in the engine; the next one enters when one has finished.
        max_tokens: maximum tokens per answer.
        ignore_eos: whether every answer is `max_tokens` long.
        log_probs: whether to request each token's log-probability, as verl does.
        only_token: the only token that may be sampled; None: all.
        dilation: dilation of the emulated clock in this run; reported seconds are divided by it. None: not emulated.
        scale: in virtual time, duration of a step relative to the published one.
        answers: in virtual time, the answer that each request gets, instead of what the engine's own model samples.
        times_parts: in virtual time, whether the parts of the host's time are measured.
    """

    prompts: Sequence[Sequence[int]]
    concurrency: int
    max_tokens: int
    temperature: float = 1.0
    ignore_eos: bool = False
    log_probs: bool = False
    only_token: int | None = None
    dilation: float | None = None
    scale: float = 1.0
    answers: Sequence[Sequence[int]] | None = None
    times_parts: bool = False


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
        steps and of time by which the CPU was too slow. For an engine in virtual time, see `VirtualEngine.end_run`.
        """
        self._connection.send(("generate", (load,)))
        run: dict[str, float] = self._answer()
        return run

    def steps(self) -> list[dict[str, Any]]:
        """Return the steps of the last run in virtual time (the fields of `virtual_time.Step`)."""
        self._connection.send(("steps", ()))
        steps: list[dict[str, Any]] = self._answer()
        return steps

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
    import torch

    torch.set_num_threads(1)  # the program's own imports may have loaded PyTorch before it could read the environment
    llm, virtual = _build(settings)
    connection.send("ready")
    actions: dict[str, Callable[..., Any]] = {
        "worker": lambda method, args: llm.collective_rpc(method, args=args)[0],
        "generate": lambda load: _generate(llm, virtual, load),
        "steps": lambda: [asdict(step) for step in virtual.steps],
    }
    while True:
        try:
            action, arguments = connection.recv()
        except EOFError:
            llm.llm_engine.engine_core.shutdown()
            sys.stderr.flush()
            os._exit(0)  # a regular exit only prints what Triton's bindings leak
        connection.send(actions[action](*arguments))


def _build(settings: EngineSettings) -> tuple[Any, Any]:
    """Return vLLM's engine and, if it runs in virtual time, its `VirtualEngine`."""
    from vllm import LLM

    arguments: dict[str, Any] = {
        "max_num_seqs": MAX_ROWS,
        "disable_log_stats": False,
        "seed": 7,
        "use_tqdm_on_load": False,
    }
    if settings.speculative is not None:
        arguments["speculative_config"] = dict(settings.speculative)
    rhyme = dict(settings.rhyme)
    if settings.virtual_model:
        assert not settings.separate_process, "virtual time needs vLLM's engine core in this process"
        from benchmarks.engines import virtual_time

        clock = virtual_time.install()
        rhyme["spec"] = {**rhyme.get("spec", {}), "num_threads": 1}
    llm = LLM(
        model=settings.model,
        max_model_len=settings.max_model_len,
        worker_extension_cls=WORKER,
        additional_config={"rhyme": rhyme},
        **arguments | settings.arguments,
    )
    if settings.emulated_model:
        llm.collective_rpc("bench_emulate", args=(settings.emulated_model,))
    if settings.speculative is not None and not all(llm.collective_rpc("bench_samples_exactly")):
        raise RuntimeError("vLLM's CPU build samples drafted rows wrongly: rhyme's fix is not active")
    if settings.speculative is not None and settings.speculative.get("model") == PROPOSER:
        assert llm.collective_rpc("rhyme_bind") == [True]
    virtual = virtual_time.VirtualEngine(llm, clock, settings.virtual_model) if settings.virtual_model else None
    return llm, virtual


def _generate(llm: Any, virtual: Any, load: Load) -> dict[str, float]:
    from vllm import SamplingParams, TokensPrompt
    from vllm.sampling_params import RequestOutputKind

    def parameters(index: int) -> SamplingParams:
        return SamplingParams(
            temperature=load.temperature,
            max_tokens=load.max_tokens,
            ignore_eos=load.ignore_eos,
            logprobs=0 if load.log_probs else None,
            allowed_token_ids=None if load.only_token is None else [load.only_token],
            detokenize=False,  # RL uses token ids
            output_kind=RequestOutputKind.FINAL_ONLY,
            extra_args=None if load.answers is None else {RECORDED_ANSWER: index},
        )

    llm.reset_prefix_cache()
    llm.collective_rpc("bench_pace", args=(load.dilation,))
    engine = llm.llm_engine
    before = _counters(llm)
    answers: dict[str, list[int]] = {}
    submitted = 0
    started = time.perf_counter()
    started_virtually = virtual.start_run(load.scale, load.answers, load.times_parts) if virtual else 0.0
    while len(answers) < len(load.prompts):
        while submitted < len(load.prompts) and submitted - len(answers) < load.concurrency:
            prompt = TokensPrompt(prompt_token_ids=list(load.prompts[submitted]))
            engine.add_request(f"{started}-{submitted}", prompt, parameters(submitted))
            submitted += 1
        for output in engine.step():
            if output.finished:
                answers[output.request_id] = list(output.outputs[0].token_ids)
    seconds = (time.perf_counter() - started) / (load.dilation or 1.0)
    tokens = sum(map(len, answers.values()))
    late = llm.collective_rpc("bench_late_shares")[0] if load.dilation else {}
    if llm.collective_rpc("rhyme_stats")[0].get("drafting_off"):
        raise RuntimeError("HistoSpec has failed and drafts nothing: see its message above")
    counts = {name: after - before[name] for name, after in _counters(llm).items()}
    run = {"seconds": seconds, "tokens": tokens, **counts, **late}
    if virtual:
        run |= virtual.end_run(started_virtually)
    return {**run, "tokens_per_s": tokens / run["seconds"]}


def _counters(llm: Any) -> dict[str, float]:
    values = dict.fromkeys(COUNTERS.values(), 0.0)
    for metric in llm.get_metrics():
        if metric.name in COUNTERS:
            values[COUNTERS[metric.name]] += metric.value
    return values
