"""Samples a step with trees: the model's token is drawn after every token of a tree, and the answer follows them.

Each token of an answer is drawn from the model's own distribution, whatever was drafted, so samples are exact.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from vllm.v1.outputs import SamplerOutput
from vllm.v1.sample.rejection_sampler import PLACEHOLDER_TOKEN_ID, apply_sampling_constraints

from rhyme_verl.histospec.tree.tree import ROOT, RowTree


def can_draw(sampling_metadata: Any) -> bool:
    """Return whether what is drawn after a token depends on nothing but its logits and the request's temperature."""
    return (
        sampling_metadata.no_penalties
        and not sampling_metadata.bad_words_token_ids
        and sampling_metadata.allowed_token_ids_mask is None
        and not any(_is_active(processor) for processor in sampling_metadata.logitsprocs.non_argmax_invariant)
        and not any(_is_active(processor) for processor in sampling_metadata.logitsprocs.argmax_invariant)
    )


def sample(
    sampler: Any, metadata: Any, logits: torch.Tensor, sampling_metadata: Any, trees: dict[int, RowTree]
) -> tuple[SamplerOutput, dict[int, list[int]]]:
    """Return the step's output in the form of vLLM's rejection sampler, and the accepted draft tokens by row.

    Args:
        sampler: vLLM's rejection sampler.
        logits: [tokens, vocabulary] of each row's newest token and of its draft's.
        trees: by row; the drafts of all other rows are paths.
    """
    raw = logits.to(torch.float32)
    constrained = apply_sampling_constraints(raw.clone(), metadata.cu_num_sampled_tokens, sampling_metadata)
    ends = metadata.cu_num_sampled_tokens.tolist()
    drawn = _draw(constrained, ends, sampling_metadata).tolist()
    drafted = metadata.draft_token_ids.tolist()
    width = metadata.max_spec_len + 1
    tokens = torch.full((len(ends), width), PLACEHOLDER_TOKEN_ID, dtype=torch.int32)
    sources = torch.zeros(len(ends), width, dtype=torch.int64)  # the logits that each token was drawn from
    accepted: dict[int, list[int]] = {}
    for row, count in enumerate(metadata.num_draft_tokens):
        start = ends[row] - count - 1
        tree = trees.get(row) or RowTree(0, 0, drafted[start - row : start - row + count], range(ROOT, count - 1))
        answer, accepted[row] = tree.walk(drawn[start : ends[row]])
        tokens[row, : len(answer)] = torch.tensor(answer, dtype=torch.int32)
        sources[row, : len(answer)] = torch.tensor([start + 1 + i for i in (ROOT, *accepted[row])])
    logprobs = None
    if sampling_metadata.max_num_logprobs is not None:
        scored = (constrained if sampler.is_processed_logprobs_mode else raw)[sources.flatten()]
        if not sampler.is_logits_logprobs_mode:
            scored = sampler.sampler.compute_logprobs(scored)
        wanted = tokens.flatten().clamp(min=0).to(torch.int64)
        logprobs = sampler.sampler.gather_logprobs(scored, sampling_metadata.max_num_logprobs, wanted)
    return SamplerOutput(sampled_token_ids=tokens, logprobs_tensors=logprobs), accepted


def _draw(constrained: torch.Tensor, ends: Sequence[int], sampling_metadata: Any) -> torch.Tensor:
    """Return a token from each row of logits, int64 [tokens]; `ends`: one past each request's last row."""
    best = constrained.argmax(-1)
    if sampling_metadata.all_greedy:
        return best
    noise = torch.empty_like(constrained).exponential_()
    starts = [0, *ends[:-1]]
    for row, generator in sampling_metadata.generators.items():
        noise[starts[row] : ends[row]].exponential_(generator=generator)
    drawn = constrained.softmax(-1).div_(noise).argmax(-1)
    if sampling_metadata.all_random:
        return drawn
    for row, temperature in enumerate(sampling_metadata.temperature.tolist()):
        if temperature == 0.0:
            drawn[starts[row] : ends[row]] = best[starts[row] : ends[row]]
    return drawn


def _is_active(processor: Any) -> bool:
    """Return whether one of vLLM's logits processors has a request to change; True for one that is not known."""
    for name in ("min_p_count", "biases", "min_toks"):
        if hasattr(processor, name):
            return bool(getattr(processor, name))
    return True
