"""The command `rhyme verify`."""

from __future__ import annotations

import json
import math
import traceback
from collections.abc import Iterable, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer

from rhyme_verl.commands.terminal import open_console
from rhyme_verl.commands.verify.engine import DRAFT_TOKENS, OWN_ARGUMENTS, GreedyAnswer, VerifiedEngine
from rhyme_verl.commands.verify.two_samples import POWER, Comparison, compare

ALPHA = 1e-3  # of all sampled tokens together
# The sampled tokens that are compared. vLLM drafts neither token 0, which follows the prompt, nor the last one.
POSITIONS = (1, 3)
SAMPLED_TOKENS = 5
HISTORY_ANSWERS = 4  # per prompt
LEAST_VERIFIED, LEAST_REJECTED = 1000, 0.1  # with less, the samples say little about drafting
LEAST_TOLERANCE = 1e-3  # of a log-prob
PROMPTS = (
    "Question: Tom has 12 apples and buys 30 more. He gives half of them to Anna. How many are left?\nAnswer:",
    "Write a Python function that returns the n-th Fibonacci number.\n\ndef fibonacci(n):",
    "The three most important facts about the ocean are",
    "Once upon a time, a fox and a crow met at the edge of a forest. The fox said:",
    "Translate to French: The weather is nice today, so we will walk to the market.\n",
    "Explain step by step why the sum of two odd numbers is even.\n",
    "List five cities in Europe and one sight in each of them:\n1.",
    "A recipe for pancakes for four people. Ingredients:",
)


@dataclass(frozen=True, kw_only=True)
class Check:
    """What is checked, and with how many answers.

    Attributes:
        texts: the prompts.
        samples: sampled answers per prompt.
        tokens: tokens of a greedy answer, and of an earlier answer.
        sampling: arguments of vLLM's `SamplingParams`.
        engine_kwargs: further arguments of vLLM's `LLM`.
    """

    model: str
    texts: Sequence[str]
    samples: int
    tokens: int
    sampling: dict[str, Any]
    engine_kwargs: dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Undrafted:
    """What the engine without drafts generated, by prompt.

    Attributes:
        prompts: distinct prompts as token ids.
        noise_gap: largest difference of a log-prob between greedy answers at three batch sizes.
        sampled: int32 [prompts, samples, tokens].
        history: earlier answers, from which the other engine drafts, in the same form.
    """

    prompts: list[list[int]]
    greedy: list[GreedyAnswer]
    noise_gap: float
    sampled: np.ndarray
    history: np.ndarray


@dataclass(frozen=True, kw_only=True)
class Findings:
    """The result of a check.

    Attributes:
        greedy, identical, unexplained: number of greedy answers; those that are identical; those that first differ at
            a token that is not a near tie.
        logprob_gap: largest difference of a log-prob between drafted and undrafted greedy answers.
        noise_gap: the same between undrafted ones at three batch sizes.
        comparisons: of sampled tokens.
        verified, accepted: numbers of draft tokens of the sampled answers.
    """

    greedy: int
    identical: int
    unexplained: int
    logprob_gap: float
    noise_gap: float
    comparisons: list[Comparison]
    verified: float
    accepted: float

    @property
    def p_value(self) -> float:
        """The smallest p-value, corrected for the number of tests."""
        return min(1.0, len(POSITIONS) * min(one.p_value for one in self.comparisons))

    @property
    def rejected(self) -> float:
        return 1.0 - self.accepted / self.verified if self.verified else 0.0

    @property
    def exit_code(self) -> int:
        """0: no difference was found; 1: a difference was found; 2: inconclusive."""
        if self.unexplained or not self.logprob_gap <= tolerance(self.noise_gap) or self.p_value < ALPHA:
            return 1
        return 2 if self.verified < LEAST_VERIFIED or self.rejected < LEAST_REJECTED else 0


def verify(
    model: Annotated[str, typer.Argument(help="Path or hub name of the model.")],
    prompts: Annotated[
        Path | None,
        typer.Option(exists=True, dir_okay=False, help="Text file, a prompt per line [default: eight built-in ones]."),
    ] = None,
    samples: Annotated[int, typer.Option(min=32, max=16384, help="Sampled answers per prompt.")] = 1024,
    tokens: Annotated[int, typer.Option(min=8, help="Tokens per greedy answer.")] = 96,
    temperature: Annotated[float, typer.Option(min=0.01, help="The job's `rollout.temperature`.")] = 1.0,
    top_p: Annotated[float, typer.Option(min=0.01, max=1.0, help="The job's `rollout.top_p`.")] = 1.0,
    top_k: Annotated[int, typer.Option(min=-1, help="The job's `rollout.top_k`; -1 for all tokens.")] = -1,
    engine_kwargs: Annotated[
        str, typer.Option(help="Arguments of vLLM's LLM as JSON, for example '{\"tensor_parallel_size\": 2}'.")
    ] = "{}",
) -> None:
    """Check on this machine that a model generates the same with drafts as without: greedy, log-probs, and samples.

    Run it with the environment variables of the job. The exit code is 0 if no difference was found, 1 if one was
    found, and 2 if nothing could be compared, or too little was verified or rejected to tell.
    """
    check = Check(
        model=model,
        texts=PROMPTS if prompts is None else _read_prompts(prompts),
        samples=samples,
        tokens=tokens,
        sampling={"temperature": temperature, "top_p": top_p, "top_k": top_k},
        engine_kwargs=_read_arguments(engine_kwargs),
    )
    try:
        found = compare_drafted(check, answer_undrafted(check))
    except typer.BadParameter:
        raise
    except Exception as error:  # vLLM raises many types
        traceback.print_exc()
        typer.echo(f"nothing was compared, because an engine failed: {error}", err=True)
        raise typer.Exit(2) from error
    console = open_console()
    for line in report(found):
        console.print(line)
    raise typer.Exit(found.exit_code)


def answer_undrafted(check: Check) -> Undrafted:
    """Generate without drafts: greedy at three batch sizes, samples, and the answers to draft from.

    Raises:
        typer.BadParameter: a prompt is too long.
    """
    _say("starting vLLM without drafts")
    with closing(VerifiedEngine(check.model, False, check.engine_kwargs)) as engine:
        prompts = [list(prompt) for prompt in dict.fromkeys(tuple(engine.tokenize(text)) for text in check.texts)]
        longest = max(map(len, prompts))
        if longest + check.tokens > engine.max_model_len:
            raise typer.BadParameter(
                f"--prompts: the longest one has {longest} tokens, which with --tokens {check.tokens} is more than "
                f"max_model_len={engine.max_model_len}: shorten it, lower --tokens, or raise max_model_len in "
                "--engine-kwargs"
            )
        copies = 1 + DRAFT_TOKENS  # as many tokens per engine step as with full drafts
        _say(f"generating {2 + copies} greedy and {check.samples} sampled answers to each of {len(prompts)} prompts")
        greedy = engine.greedy(prompts, check.tokens)
        alone = [answer for prompt in prompts for answer in engine.greedy([prompt], check.tokens)]
        repeated = engine.greedy(prompts * copies, check.tokens)
        return Undrafted(
            prompts=prompts,
            greedy=greedy,
            noise_gap=_largest(map(largest_gap, greedy * (1 + copies), alone + repeated)),
            sampled=engine.sample(prompts, check.samples, SAMPLED_TOKENS, check.sampling),
            history=engine.sample(prompts, HISTORY_ANSWERS, check.tokens, check.sampling),
        )


def compare_drafted(check: Check, undrafted: Undrafted) -> Findings:
    """Generate with drafts, and compare.

    Raises:
        typer.BadParameter: the samples have only one token, so there is nothing to compare.
    """
    _say("starting vLLM with drafts")
    prompts = undrafted.prompts
    with closing(VerifiedEngine(check.model, True, check.engine_kwargs)) as engine:
        engine.remember(prompts, undrafted.history)
        _say(f"generating 1 greedy and {check.samples} sampled answers to each of {len(prompts)} prompts")
        greedy = engine.greedy(prompts, check.tokens)
        before = engine.counts()
        sampled = engine.sample(prompts, check.samples, SAMPLED_TOKENS, check.sampling)
        after = engine.counts()
    samples = [(undrafted.sampled[:, :, at].tolist(), sampled[:, :, at].tolist()) for at in POSITIONS]
    compared = [compare(left, right, ALPHA / len(POSITIONS)) for left, right in samples]
    comparisons = [one for one in compared if one]
    if not comparisons:
        raise typer.BadParameter("--temperature: only one token is sampled after each prompt: raise it or --top-p")
    pairs = list(zip(undrafted.greedy, greedy, strict=True))
    allowed = tolerance(undrafted.noise_gap)
    return Findings(
        greedy=len(pairs),
        identical=sum(left.tokens == right.tokens for left, right in pairs),
        unexplained=sum(not is_near_tie(left, right, allowed) for left, right in pairs),
        logprob_gap=_largest(largest_gap(left, right) for left, right in pairs),
        noise_gap=undrafted.noise_gap,
        comparisons=comparisons,
        verified=after["num_draft_tokens"] - before["num_draft_tokens"],
        accepted=after["num_accepted_tokens"] - before["num_accepted_tokens"],
    )


def report(found: Findings) -> list[str]:
    """Return the lines that the command prints."""
    near_ties = found.greedy - found.identical - found.unexplained
    verdicts = (
        "no difference found",
        "a difference was found: with drafts, this model generates something else here",
        f"inconclusive: at least {LEAST_VERIFIED:,} draft tokens have to be verified and {LEAST_REJECTED:.0%} of them "
        "rejected: raise --samples, or give --prompts that the model is less certain about",
    )
    return [
        f"greedy answers: {found.identical} of {found.greedy} identical; {near_ties} differ from a near tie on, "
        f"{found.unexplained} from another token on",
        f"log-probs: drafts change them by up to {found.logprob_gap:.2g}, another batch size by up to "
        f"{found.noise_gap:.2g}; up to {tolerance(found.noise_gap):.2g} is no difference",
        f"sampled tokens: p = {found.p_value:.3g} in a chi-square test; below {ALPHA:g} is a difference",
        "smallest distortion of the sampled tokens that the test finds with a probability of "
        f"{POWER:.0%}: {max(one.detectable for one in found.comparisons):.1%} (total variation distance)",
        f"drafts: {found.verified:,.0f} tokens verified, {found.rejected:.0%} of them rejected",
        verdicts[found.exit_code],
    ]


def tolerance(noise_gap: float) -> float:
    """Return the largest difference of two log-probs that is explained by rounding."""
    return max(LEAST_TOLERANCE, 2.0 * noise_gap)


def largest_gap(left: GreedyAnswer, right: GreedyAnswer) -> float:
    """Return the largest difference of a token's log-prob over the common beginning of two answers."""
    same = zip(left.tokens[: _first_difference(left, right)], left.logprobs, right.logprobs, strict=False)
    return _largest(abs(ours[token] - theirs[token]) for token, ours, theirs in same)


def _largest(gaps: Iterable[float]) -> float:
    """Return the maximum, which is NaN if one of them is; 0 without any."""
    return float(np.max([0.0, *gaps]))


def is_near_tie(left: GreedyAnswer, right: GreedyAnswer, allowed: float) -> bool:
    """Return whether two answers are identical, or `left` was about to continue as `right` does where they part.

    Args:
        allowed: difference between the log-probs of two tokens that counts as a tie.
    """
    at = _first_difference(left, right)
    if at == min(len(left.tokens), len(right.tokens)):
        return left.tokens == right.tokens
    logprobs = left.logprobs[at]
    return logprobs[left.tokens[at]] - logprobs.get(right.tokens[at], -math.inf) <= allowed


def _first_difference(left: GreedyAnswer, right: GreedyAnswer) -> int:
    """Return the number of tokens at the beginning that are the same."""
    pairs = list(zip(left.tokens, right.tokens, strict=False))
    return next((index for index, (ours, theirs) in enumerate(pairs) if ours != theirs), len(pairs))


def _read_prompts(path: Path) -> list[str]:
    try:
        texts = [line for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    except ValueError as error:
        raise typer.BadParameter(f"--prompts: {path} is not UTF-8 ({error}): give a text file") from error
    if not texts:
        raise typer.BadParameter(f"--prompts: {path} has no prompts: give one per line")
    return texts


def _read_arguments(text: str) -> dict[str, Any]:
    try:
        arguments = json.loads(text)
    except ValueError as error:
        raise typer.BadParameter(f"--engine-kwargs: give a JSON object: {error}") from error
    if not isinstance(arguments, dict):
        raise typer.BadParameter(f"--engine-kwargs: give a JSON object, not {text}")
    if taken := [name for name in OWN_ARGUMENTS if name in arguments]:
        raise typer.BadParameter(f"--engine-kwargs: rhyme verify sets {', '.join(taken)} itself: leave them out")
    return arguments


def _say(text: str) -> None:
    typer.echo(f"{text} ...", err=True)
