"""Measures verl's own overhead: tokens per second of its rollout server relative to the vLLM engine alone.

The same requests go, interleaved, to

    vllm          verl's vLLM server, in its Ray actor
    rhyme-off     rhyme's server without drafts (`rollout.name=rhyme`, `spec.enabled=false`)
    engine        vLLM's AsyncLLM in this process; answers are read in full after every step, as verl's server does
    engine-final  the same engine; an answer is built once, when it is complete, and is not detokenized
    engine-uni    like engine-final, but the model runs inside the engine-core process instead of a worker process

Servers are called as in verl's `sync` mode: `LLMServerClient.generate`, the client of the agent-loop workers, asks
verl's load-balancer actor for a server and calls `generate` of its actor. This process is that client. All systems stay
alive (14 GiB of memory) and idle while one is measured; the CPU time that they use meanwhile is recorded as `others`.

If py-spy is installed, it then profiles each case in additional runs, which are not counted.
"""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any
from uuid import uuid4

import psutil
import typer
from rich.table import Table

from benchmarks.common.processes import OTHERS, PY_SPY, by_role, cpu_seconds, no_process_left, profile
from benchmarks.common.result_files import RESULTS, bar, bars_table, console, spread, write_result
from examples.quickstart import quickstart
from examples.quickstart.job import CPU_ENVIRONMENT
from examples.quickstart.policy import SHIPPED_POLICY
from examples.quickstart.problems import make_problem

SERVERS = ("vllm", "rhyme-off")
ENGINE, ENGINE_FINAL, ENGINE_UNI = "engine", "engine-final", "engine-uni"
CASES = (*SERVERS, ENGINE, ENGINE_FINAL, ENGINE_UNI)
SAMPLES = 8  # answers per problem
REQUESTS = {64: 384, 256: 768}  # requests per run, by concurrency
PROFILED_CONCURRENCY = 64
GOAL = f"rhyme undrafted / {ENGINE_UNI} at 64"  # both run the model in the engine core's process
ENVIRONMENT = {
    **CPU_ENVIRONMENT,
    "OMP_NUM_THREADS": "1",  # the number of threads per engine on rhyme's CPU platform
    "RAY_worker_niceness": "0",  # otherwise Ray's workers would yield to this process, unlike in a verl job
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
}
SAMPLING_SETTINGS = ("temperature", "top_p", "top_k")
# Settings that AsyncLLM takes from the servers' config; all others are vLLM's defaults in both.
ENGINE_SETTINGS = (
    "dtype", "enable_chunked_prefill", "enable_prefix_caching", "enable_sleep_mode", "enforce_eager", "logprobs_mode",
    "gpu_memory_utilization", "disable_log_stats", "max_model_len", "max_num_batched_tokens", "max_num_seqs", "seed",
)  # fmt: skip
ROLES = ("client", "server", "engine core", "worker", "load balancer", "Ray", OTHERS)
MAX_IDLE_CORES = 0.2  # cores that idle systems may use before a run counts as disturbed

Request = list[int]  # a prompt's token ids
Run = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class System:
    """A server or an engine to measure."""

    generate: Callable[[Request], Awaitable[int]]  # returns the number of answer tokens
    clear_cache: Callable[[], Awaitable[Any]]  # of prefixes
    num_steps: Callable[[], Awaitable[int]]  # engine steps so far
    pids: dict[str, list[int]]  # process ids by role


def main(
    repeats: Annotated[int, typer.Option(min=1, help="Runs per case and concurrency, interleaved.")] = 3,
    cases: Annotated[str, typer.Option(help=f"Comma-separated cases; {ENGINE} is required.")] = ",".join(CASES),
    requests: Annotated[int | None, typer.Option(min=SAMPLES, help=f"Requests per run, instead of {REQUESTS}.")] = None,
    profile_seconds: Annotated[
        int, typer.Option(min=0, help="Seconds that py-spy (`pip install py-spy`) profiles each case; 0: none.")
    ] = 10,
    result: Annotated[Path, typer.Option(help="Path of the result file.")] = RESULTS / "server_overhead.json",
) -> None:
    """Measure the overhead of verl's server."""
    chosen = cases.split(",")
    if ENGINE not in chosen or not set(chosen) <= set(CASES):
        raise typer.BadParameter(f"--cases: choose from {', '.join(CASES)}, including {ENGINE}")
    if profile_seconds and not PY_SPY.exists():
        console.print("no profiles: py-spy is not installed (`pip install py-spy`)")
        profile_seconds = 0
    counts = {concurrency: requests or count for concurrency, count in REQUESTS.items()}
    os.environ.update(ENVIRONMENT)
    with no_process_left():
        runs, profiles = asyncio.run(measure(chosen, counts, repeats, profile_seconds))
    summary = summarize(runs)
    bars = {}
    if {"rhyme-off", ENGINE_UNI} <= set(chosen):
        bars[GOAL] = bar(summary["64"]["rhyme-off"]["ratio_to_engine_uni"]["median"], at_least=0.8)
    console.print(overview(summary))
    if bars:
        console.print(bars_table(bars))
    content = {"requests": counts, "bars": bars, "summary": summary, "profiles": profiles, "runs": runs}
    write_result(result, content)


async def measure(
    cases: Sequence[str], counts: Mapping[int, int], repeats: int, profile_seconds: int
) -> tuple[list[Run], dict[str, Any]]:
    """Return all runs and the profiles by case."""
    import ray
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(SHIPPED_POLICY)

    def encode(question: str) -> Request:
        message = {"role": "user", "content": question}
        return tokenizer.apply_chat_template([message], add_generation_prompt=True, return_dict=False)

    runs: list[Run] = []
    with ExitStack() as stack:
        ray.init("local", num_cpus=16, num_gpus=len(SERVERS), include_dashboard=False, log_to_driver=False)
        stack.callback(ray.shutdown)
        signal.signal(signal.SIGTERM, lambda *_: signal.raise_signal(signal.SIGINT))  # otherwise Ray does not clean up
        systems = await start(cases, stack)
        for system in systems.values():
            await run(system, make_requests(encode, 0, 64), 64)  # warms up
        for repeat in range(repeats):
            for concurrency, count in counts.items():
                load = make_requests(encode, repeat * max(counts.values()), count)
                for case in cases if repeat % 2 == 0 else reversed(cases):
                    measured = await run(systems[case], load, concurrency)
                    runs.append({"case": case, "concurrency": concurrency, "repeat": repeat, **measured})
                    console.print(f"{repeat + 1}/{repeats}  {case}, {concurrency} at a time: {describe(measured)}")
        load = make_requests(encode, 0, counts[PROFILED_CONCURRENCY])
        profiles = {}
        for case in cases if profile_seconds else ():
            console.print(f"profiling {case} ...")
            answer = partial(run, systems[case], load, PROFILED_CONCURRENCY)
            profiles[case] = await profile(systems[case].pids, profile_seconds, answer)
    return runs, profiles


async def start(cases: Iterable[str], stack: ExitStack) -> dict[str, System]:
    """Start the systems of the cases, one after another. Closing the stack ends the engines."""
    systems = {}
    for case in cases:
        if case in systems:
            continue
        console.print(f"starting {case} ...")
        if case in SERVERS:
            systems[case] = await start_server(case)
        elif case == ENGINE_UNI:
            systems[ENGINE_UNI] = start_engine(stack, worker_in_core=True)[1]
        else:
            systems[ENGINE], systems[ENGINE_FINAL] = start_engine(stack)
    return systems


async def start_server(case: str) -> System:
    """Start a standalone verl replica, and verl's client for it in this process."""
    from verl.workers.rollout.llm_server import LLMServerClient
    from verl.workers.rollout.replica import get_rollout_replica_class
    from verl.workers.rollout.router import get_router_handle

    config = job_config(case)
    rollout, model = config.actor_rollout_ref.rollout, config.actor_rollout_ref.model
    replica = get_rollout_replica_class(rollout.name)(
        replica_rank=0, config=rollout, model_config=model, gpus_per_node=1, name_suffix=case
    )
    await replica.init_standalone()
    server = replica.server_handle
    balancer = get_router_handle(servers={replica.server_address: server})
    client = LLMServerClient(config, balancer)
    sampling = {  # as in verl's AgentLoopWorker.generate_sequences
        **{name: rollout[name] for name in SAMPLING_SETTINGS},
        "repetition_penalty": 1.0,
        "logprobs": rollout.calculate_log_probs,
    }

    async def generate(prompt: Request) -> int:
        output = await client.generate(uuid4().hex, prompt_ids=prompt, sampling_params=dict(sampling))
        return len(output.token_ids)

    async def num_steps() -> int:
        return await server.__ray_call__.remote(lambda server: server.engine.num_steps)

    await server.__ray_call__.remote(lambda server: count_steps(server.engine))
    pid, balancer_pid = [await actor.__ray_call__.remote(lambda _: os.getpid()) for actor in (server, balancer)]
    pids = {"client": [os.getpid()], "server": [pid], "load balancer": [balancer_pid]}
    pids |= engine_pids(psutil.Process(pid).children(recursive=True), pid)
    return System(generate=generate, clear_cache=replica.clear_kv_cache, num_steps=num_steps, pids=pids)


def start_engine(stack: ExitStack, *, worker_in_core: bool = False) -> tuple[System, System]:
    """Start vLLM's AsyncLLM in this process, configured as in verl's server.

    Returns two systems, which read answers in full after every step, or once when they are complete.
    """
    from vllm import AsyncEngineArgs, SamplingParams
    from vllm.sampling_params import RequestOutputKind
    from vllm.v1.engine.async_llm import AsyncLLM

    rollout = job_config("vllm").actor_rollout_ref.rollout
    # At 1, vLLM's CPU platform turns `uni` into `mp`. AsyncLLM starts an engine-core process in either case.
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0" if worker_in_core else "1"
    before = psutil.Process().children(recursive=True)
    arguments = AsyncEngineArgs(
        model=str(SHIPPED_POLICY),
        worker_extension_cls=rollout.engine_kwargs.vllm.worker_extension_cls,
        distributed_executor_backend="uni" if worker_in_core else None,
        **{name: rollout[name] for name in ENGINE_SETTINGS},
    )
    engine = AsyncLLM.from_engine_args(arguments)
    stack.callback(engine.shutdown)
    started = [process for process in psutil.Process().children(recursive=True) if process not in before]
    pids = {"client": [os.getpid()], **engine_pids(started, os.getpid())}
    count_steps(engine)

    async def num_steps() -> int:
        return engine.num_steps

    def read_by(kind: RequestOutputKind, detokenize: bool) -> System:
        sampling = SamplingParams(
            **{name: rollout[name] for name in SAMPLING_SETTINGS},
            logprobs=0,
            max_tokens=rollout.response_length,
            output_kind=kind,
            detokenize=detokenize,
        )

        async def generate(prompt: Request) -> int:
            async for output in engine.generate({"prompt_token_ids": prompt}, sampling, uuid4().hex):
                answer = output.outputs[0]
            return len([answer.logprobs[index][token].logprob for index, token in enumerate(answer.token_ids)])

        return System(generate=generate, clear_cache=engine.reset_prefix_cache, num_steps=num_steps, pids=pids)

    return read_by(RequestOutputKind.CUMULATIVE, True), read_by(RequestOutputKind.FINAL_ONLY, False)


def job_config(case: str) -> Any:
    """Return the quickstart job's config with the rollout `case`, for a replica without a trainer."""
    from rhyme_verl.commands.doctor.job import compose_job

    arguments = quickstart.job_arguments(Path("runs/server_overhead"), 1, case)
    overrides = [argument for argument in arguments if not argument.startswith(("--", "hydra."))]
    rollout = "actor_rollout_ref.rollout"  # no trainer sends weights, so the engine loads the policy's
    overrides += [f"{rollout}.load_format=auto", f"{rollout}.max_num_seqs={max(REQUESTS)}"]
    return compose_job(quickstart.CONFIG_FOLDER, "quickstart", overrides)


def count_steps(engine: Any) -> None:
    """Count an AsyncLLM's steps in its `num_steps`: the engine core sends one message per step."""
    receive = engine.engine_core.get_output_async

    async def receive_and_count() -> Any:
        outputs = await receive()
        engine.num_steps += 1
        return outputs

    engine.num_steps = 0
    engine.engine_core.get_output_async = receive_and_count


def engine_pids(processes: Iterable[psutil.Process], host: int) -> dict[str, list[int]]:
    """Separate the engine core, a child of the process `host`, from the worker, a child of the core."""
    core = [process.pid for process in processes if process.ppid() == host]
    return {"engine core": core, "worker": [process.pid for process in processes if process.pid not in core]}


def make_requests(encode: Callable[[str], Request], first_problem: int, count: int) -> list[Request]:
    """Return the prompts of `count` requests: SAMPLES per problem, one after another as verl sends them."""
    problems = [make_problem("train", 0, first_problem + index) for index in range(count // SAMPLES)]
    return [prompt for prompt in (encode(problem.question) for problem in problems) for _ in range(SAMPLES)]


async def run(system: System, requests: Sequence[Request], concurrency: int) -> Run:
    """Send all requests, `concurrency` at a time; return tokens/s, seconds per engine step and CPU seconds by role."""
    await system.clear_cache()
    steps_before, cpu_before, started = await system.num_steps(), cpu_seconds(), time.perf_counter()
    waiting = iter(requests)

    async def take_turns() -> int:
        return sum([await system.generate(prompt) for prompt in waiting])

    tokens = sum(await asyncio.gather(*(take_turns() for _ in range(concurrency))))
    seconds = time.perf_counter() - started
    ray_daemons = [child.pid for child in psutil.Process().children() if child.name() in ("raylet", "gcs_server")]
    cpu = by_role(cpu_before, cpu_seconds(), {**system.pids, "Ray": ray_daemons})
    steps = await system.num_steps() - steps_before
    return {
        "seconds": seconds,
        "tokens": tokens,
        "tokens_per_s": tokens / seconds,
        "steps": steps,
        "seconds_per_step": seconds / steps,
        "cpu_seconds": cpu,
    }


def describe(measured: Run) -> str:
    """Return one line about a run, with a warning if idle systems used the CPU."""
    idle_cores = measured["cpu_seconds"][OTHERS] / measured["seconds"]
    disturbed = f"; idle systems used {idle_cores:.2f} cores" if idle_cores > MAX_IDLE_CORES else ""
    return f"{measured['tokens_per_s']:,.0f} tokens/s, {measured['seconds']:.1f} s{disturbed}"


def summarize(runs: Sequence[Run]) -> dict[str, dict[str, Any]]:
    """Return by concurrency and case: tokens/s, its ratios to engines alone per repeat, ms per step, CPU by role."""
    groups: dict[tuple[int, str], list[Run]] = {}
    for one in runs:
        groups.setdefault((one["concurrency"], one["case"]), []).append(one)
    summary: dict[str, dict[str, Any]] = {}
    for (concurrency, case), group in groups.items():
        summary.setdefault(str(concurrency), {})[case] = {
            "tokens_per_s": spread([one["tokens_per_s"] for one in group]),
            **{
                f"ratio_to_{other.replace('-', '_')}": spread(
                    [one["tokens_per_s"] / engine["tokens_per_s"] for one, engine in zip(group, engines, strict=True)]
                )
                for other in (ENGINE, ENGINE_UNI)
                if (engines := groups.get((concurrency, other)))
            },
            "ms_per_step": spread([1000 * one["seconds_per_step"] for one in group]),
            "cpu_seconds_per_1k_tokens": {
                role: spread([1000 * one["cpu_seconds"][role] / one["tokens"] for one in group])
                for role in group[0]["cpu_seconds"]
            },
        }
    return summary


def overview(summary: Mapping[str, Mapping[str, Any]]) -> Table:
    """Return the table of all cases."""
    table = Table(title="verl's servers and the engine alone (medians); CPU seconds per 1k tokens by process")
    for heading in ("at a time", "case", "tokens/s", "ratio to engine", "ms per step", *ROLES):
        table.add_column(heading, justify="left" if heading == "case" else "right")
    for concurrency, rows in summary.items():
        for case in (case for case in CASES if case in rows):
            row, cpu = rows[case], rows[case]["cpu_seconds_per_1k_tokens"]
            table.add_row(
                concurrency,
                case,
                f"{row['tokens_per_s']['median']:,.0f}",
                f"{row['ratio_to_engine']['median']:.2f}",
                f"{row['ms_per_step']['median']:.1f}",
                *(f"{cpu[role]['median']:.3f}" if role in cpu else "" for role in ROLES),
            )
    return table


if __name__ == "__main__":
    typer.run(main)
