"""The quickstart job with verl's tool agent on one CPU machine: two turns per answer, both drafted from history.

Run from the repository's root: `python -m examples.tool_agent.run`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from examples.quickstart import quickstart
from examples.quickstart.quickstart import console
from examples.quickstart.report import by_epoch, epoch_table

ROLLOUT = "actor_rollout_ref.rollout"


def overrides(trace: Path) -> list[str]:
    """Return the overrides that make the quickstart job a tool agent and record its trajectories."""
    return [
        f"{ROLLOUT}.agent.default_agent_loop=tool_agent",
        f"{ROLLOUT}.multi_turn.enable=true",
        f"{ROLLOUT}.multi_turn.function_tool_path={Path(__file__).with_name('calculator.py').resolve()}",
        f"{ROLLOUT}.multi_turn.format=last_sum",
        f"{ROLLOUT}.multi_turn.max_assistant_turns=2",
        f"+{ROLLOUT}.custom.rhyme.trace.path={trace.resolve()}",
        "data.max_response_length=600",
    ]


def main(
    out: Annotated[Path, typer.Option(help="Folder of the run.")] = Path("runs/tool_agent"),
    epochs: Annotated[int, typer.Option(min=1, help="Epochs over the same prompts.")] = 3,
    num_problems: Annotated[int, typer.Option(help=f"A multiple of {quickstart.BATCH_SIZE}.")] = quickstart.BATCH_SIZE,
    override: Annotated[list[str] | None, typer.Option(help="A further verl override; repeatable.")] = None,
) -> None:
    """Train with a tool agent and print drafting statistics per epoch."""
    steps = quickstart.run(out, epochs, num_problems, "rhyme", overrides(out / "trace") + (override or []))
    console.print(epoch_table(by_epoch(steps)))
    console.print(f"trajectories, with the tool's output, are in {out / 'trace'}")


if __name__ == "__main__":
    typer.run(main)
