"""Composes every variant of every recipe and runs the checks of verl and rhyme_verl, without GPU, weights or data.

Run from the repository's root: `make check-recipes`, or `python -m recipes.check --help`.
"""

from __future__ import annotations

import contextlib
import io
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer
from hydra import compose, initialize_config_dir
from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).parent
RECIPES = ("gsm8k", "dapo")
RHYME = ("both", "histospec", "baseline")
HARDWARE = {  # value of `hardware=`: trainer modes that it is meant for
    "node": ("sync",),
    "node_async": ("colocate_async",),
    "cluster": ("separate_async",),
    "cluster_async": ("colocate_async",),
    "cpu": ("sync", "colocate_async"),
}


def variants() -> Iterator[tuple[str, list[str]]]:
    """Yield (recipe, Hydra overrides) for all variants in the recipes' READMEs."""
    for recipe in RECIPES:
        for rhyme in RHYME:
            for hardware, modes in HARDWARE.items():
                for mode in modes:
                    yield recipe, [f"rhyme={rhyme}", f"hardware={hardware}", f"trainer.v1.trainer_mode={mode}"]


def compose_recipe(recipe: str, overrides: list[str]) -> Any:
    """Return the whole config of the job that `main_ppo` would run, as a DictConfig."""
    with initialize_config_dir(config_dir=str(ROOT), version_base=None):
        return compose(f"{recipe}/{recipe}", overrides=overrides)


def check(config: Any) -> None:
    """Run all of verl's checks of a composed job that need no devices; they include rhyme_verl's.

    Raises:
        ValueError, AssertionError, FileNotFoundError: verl or rhyme_verl rejects the config.
    """
    from verl.trainer.ppo.reward import load_reward_manager
    from verl.trainer.ppo.utils import need_critic, need_reference_policy
    from verl.trainer.ppo.v1 import get_trainer_cls
    from verl.utils.config import omega_conf_to_dataclass, validate_config
    from verl.utils.import_utils import load_class_from_fqn, resolve_config_path

    with contextlib.redirect_stdout(io.StringIO()):  # verl prints a line per valid config
        validate_config(config, use_reference_policy=need_reference_policy(config), use_critic=need_critic(config))
    get_trainer_cls(config.trainer.v1.trainer_mode)(config=config)
    rollout = omega_conf_to_dataclass(config.actor_rollout_ref.rollout)
    if manager := rollout.agent.agent_loop_manager_class:
        load_class_from_fqn(manager)
    if rollout.router_config_path:
        resolve_config_path(rollout.router_config_path)
    load_reward_manager(config, tokenizer=None)


def main(
    verbose: Annotated[bool, typer.Option(help="Print each variant before it is checked.")] = False,
) -> None:
    """Check all variants of all recipes. The exit code is 1 if one fails."""
    console = Console(soft_wrap=True, highlight=False)
    table = Table("recipe", "variant", "result")
    failures = 0
    for recipe, overrides in variants():
        if verbose:
            console.print(f"{recipe} {' '.join(overrides)}")
        try:
            check(compose_recipe(recipe, overrides))
            result = "ok"
        except (ValueError, AssertionError, OSError) as error:
            failures += 1
            result = str(error)
        table.add_row(recipe, " ".join(overrides), result)
    console.print(table)
    raise typer.Exit(1 if failures else 0)


if __name__ == "__main__":
    typer.run(main)
