"""Every code block of README and docs names targets, modules, options, settings and files that exist."""

import importlib
import re
import shlex
from pathlib import Path

import pytest
import typer
from hydra import compose, initialize_config_module

from rhyme_verl.cli import app
from rhyme_verl.integration.preflight import MANAGER, prepare_job

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
DIAGRAM = re.compile("[─│┌▶◀▲▼]")
ANY_CONFIG = ("<your config>", "<overrides of the job>")
MODEL = "actor_rollout_ref.model.path=Qwen/Qwen2.5-0.5B"


def blocks():
    for page in PAGES:
        for match in re.finditer(r"^```\w*\n(.*?)^```", page.read_text(encoding="utf-8"), re.M | re.S):
            yield page.name, match.group(1)


def commands():
    """The commands of all blocks but diagrams and file trees; comments are left out, continued lines are joined."""
    for page, block in blocks():
        if DIAGRAM.search(block) or block.startswith("rhyme_verl/"):
            continue
        for line in block.replace("\\\n", " ").splitlines():
            for placeholder in ANY_CONFIG:
                line = line.replace(placeholder, "")
            words = shlex.split(line, comments=True)
            if words and re.match(r"[A-Z_]+=", words[0]):
                del words[0]
            if words:
                yield pytest.param(words, id=f"{page}: {' '.join(words)[:60]}")


def check_options(command, words):
    known = {option for parameter in command.params for option in parameter.opts}
    assert {word.partition("=")[0] for word in words if word.startswith("--")} <= known | {"--help"}


def check_overrides(words):
    with initialize_config_module("verl.trainer.config", version_base=None):
        config = compose("ppo_trainer", overrides=[MODEL, *words])
    prepare_job(config)
    rollout = config.actor_rollout_ref.rollout
    if rollout.name == "rhyme":
        assert rollout.agent.agent_loop_manager_class == MANAGER


@pytest.mark.slow
@pytest.mark.parametrize("words", commands())
def test_a_command_exists_with_its_options(words):
    program, *rest = words
    if program == "make":
        assert re.search(rf"^{rest[0]}:.*##", (ROOT / "Makefile").read_text(encoding="utf-8"), re.M)
    elif program == "pip":
        assert rest[0] == "install"
        packaging = (ROOT / "setup.py").read_text(encoding="utf-8") + (ROOT / "pyproject.toml").read_text("utf-8")
        packaging += (ROOT / "tools/setup_bench.sh").read_text(encoding="utf-8")
        for name in (word for word in rest[1:] if not word.startswith(("-", "."))):
            assert re.search(rf"[\"' ]{re.split('[^a-z0-9_-]', name)[0]}\b", packaging), name
    elif program == "rhyme":
        command = typer.main.get_command(app).commands[rest[0]]
        if rest[0] == "history":
            command = command.commands[rest[1]]
        check_options(command, rest[1:])
    elif words[:3] == ["python", "-m", "verl.trainer.main_ppo"]:
        check_overrides(words[3:])
    elif words[:2] == ["python", "-m"]:
        module = importlib.import_module(words[2])
        command = typer.Typer()
        command.command()(module.main)
        check_options(typer.main.get_command(command), words[3:])
    elif words[:2] == ["mkdir", "-p"]:
        used = {word.rpartition("=")[2] for other in commands() if other.values[0] != words for word in other.values[0]}
        assert set(rest[1:]) <= used, "no other command uses the folder"
    elif program == "benchmarks/engines/gpu_check.sh":
        assert not set(rest) - set(re.search(r"parts=\((\w[\w ]*)\)", (ROOT / program).read_text("utf-8"))[1].split())
    elif program.startswith(("+", "actor_rollout_ref.", "trainer.")):
        check_overrides(["actor_rollout_ref.rollout.name=rhyme", *words])
    else:
        pytest.fail(f"no rule for {' '.join(words)}")


def test_the_file_tree_is_complete():
    (tree,) = (block for page, block in blocks() if page == "internals.md" and block.startswith("rhyme_verl/"))
    folder, listed = "", set()
    for line in tree.splitlines():
        if not line.startswith(" "):
            folder = line.split()[0]
            continue
        name, *more = re.match(r"  (\S+?)(?:, (\.cpp))? ", line).groups()
        listed |= {folder + name, *(folder + name.rpartition(".")[0] + suffix for suffix in more if suffix)}
    files = [path for path in (ROOT / "rhyme_verl").rglob("*") if path.suffix in (".py", ".h", ".cpp", ".yaml")]
    wanted = {str(path.relative_to(ROOT)) for path in files if path.name != "__init__.py"}
    assert sorted(wanted - listed) == [], "files without a clause"
    assert sorted(name for name in listed if "*" not in name and not (ROOT / name).exists()) == [], "no such files"
