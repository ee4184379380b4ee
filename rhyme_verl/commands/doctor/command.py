"""The command `rhyme doctor`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer
import yaml
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from rich.table import Column, Table
from rich.text import Text

from rhyme_verl.commands.doctor.finding import Finding, Verdict, fault, ok
from rhyme_verl.commands.doctor.installation import REINSTALL, check_installation
from rhyme_verl.commands.doctor.job import check_config, compose_job, environment_of
from rhyme_verl.commands.terminal import open_console
from rhyme_verl.config import ConfigError

STYLES = {Verdict.OK: "green", Verdict.NOTE: "yellow", Verdict.FAULT: "bold red"}
PROBE_SECONDS = 300.0
PROBED = {  # answer of `probe`: what a true answer means, and the remedy for a false one
    "rollout": ("verl knows rollout.name=rhyme", REINSTALL),
    "replica": ("verl can start its replicas", REINSTALL),
    "config_check": ("verl's config check includes rhyme_verl's", REINSTALL),
    "metrics": ("verl's trainer logs rhyme_verl's metrics", "install a verl that rhyme_verl supports"),
    "sampler": ("vLLM's rejection sampler is exact here", "install a vLLM that rhyme_verl supports"),
}


def doctor(
    overrides: Annotated[
        list[str] | None, typer.Argument(help="Hydra overrides of the job, as passed to verl.trainer.main_ppo.")
    ] = None,
    config_dir: Annotated[
        Path | None, typer.Option("--config-dir", "--config-path", help="The job's --config-dir or --config-path.")
    ] = None,
    config_name: Annotated[str, typer.Option(help="The job's --config-name.")] = "ppo_trainer",
    config: Annotated[
        Path | None,
        typer.Option(help="A composed job config (Hydra's .hydra/config.yaml), instead of overrides."),
    ] = None,
    cluster: Annotated[
        str | None, typer.Option(help="Also check all nodes of the running Ray cluster at this address (host:port).")
    ] = None,
    shared: Annotated[
        list[Path] | None, typer.Option(help="With --cluster: a folder that all nodes should share. May be repeated.")
    ] = None,
    quick: Annotated[bool, typer.Option(help="Skip the checks that import verl and vLLM (half a minute).")] = False,
) -> None:
    """Check this installation and, if given, a job and a Ray cluster: report faults and how to fix them.

    Run it with the environment variables of the job. The exit code is 1 if there is a fault. Notes may be intended.
    """
    findings, sent = list(check_installation(os.environ)), dict[str, str]()
    if not quick:
        findings += _probe()
    if config is not None or config_dir is not None or overrides:
        try:
            job = OmegaConf.load(config) if config else compose_job(config_dir, config_name, overrides or [])
            findings += check_config(job, os.environ, cluster is not None, overrides or [])
            sent = environment_of(job)
        except (ConfigError, OSError, ValueError, OmegaConfBaseException, yaml.YAMLError) as error:
            remedy = "fix the overrides or the file; or give --config-dir and --config-name"
            findings.append(fault("job", " ".join(str(error).split()), remedy))
    if cluster is not None:
        from rhyme_verl.commands.doctor.cluster import check_cluster

        findings += check_cluster(cluster, shared or [], sent)
    table = Table("check", "", Column("found", overflow="fold"), Column("what to do", overflow="fold"))
    for finding in findings:
        verdict = Text(finding.verdict.value, style=STYLES[finding.verdict])
        table.add_row(finding.check, verdict, Text(finding.text), Text(finding.remedy))
    open_console().print(table)
    faults = sum(finding.verdict is Verdict.FAULT for finding in findings)
    open_console().print("no faults" if not faults else f"{faults} fault{'s' * (faults > 1)}")
    raise typer.Exit(1 if faults else 0)


def _probe() -> Iterator[Finding]:
    command = [sys.executable, "-m", "rhyme_verl.commands.doctor.probe"]
    try:
        result = subprocess.run(command, capture_output=True, text=True, timeout=PROBE_SECONDS)
    except subprocess.TimeoutExpired:
        yield fault("imports", f"verl and vLLM did not import within {PROBE_SECONDS:.0f} s", "import them in Python")
        return
    lines = [line for line in result.stdout.splitlines() if line.startswith("{")]
    if result.returncode or not lines:
        errors = [line for line in result.stderr.splitlines() if line.strip()]
        yield fault("imports", f"verl and vLLM cannot be imported: {errors[-1] if errors else 'no message'}",
                    "fix the environment; to see the error: " + " ".join(["python", *command[1:]]))  # fmt: skip
        return
    answers = json.loads(lines[-1])
    yield ok("imports", f"verl's platform is {answers['platform']}, vLLM's is {answers['vllm_platform']}")
    for name, (text, remedy) in PROBED.items():
        yield ok("imports", text) if answers[name] else fault("imports", f"not true: {text}", remedy)
