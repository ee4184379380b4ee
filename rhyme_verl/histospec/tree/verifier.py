"""Makes a model runner of vLLM's CPU engine verify trees, by four hooks on its own objects.

After inputs are prepared, the positions of draft tokens become those in their answer. Attention of rows with trees is
computed anew (`cpu_attention`). Steps with trees are sampled by walking them (`sampling`). The keys and values of
accepted tokens then move to where they would be if the draft had been a path, so nothing later differs.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
from vllm.platforms import current_platform

from rhyme_verl.histospec.tree.cpu_attention import attention_of_trees
from rhyme_verl.histospec.tree.sampling import can_draw, sample
from rhyme_verl.histospec.tree.tree import ROOT, RowTree


class TreeVerifier:
    """Verifies the trees that a proposer has announced.

    Raises:
        RuntimeError: the engine cannot verify trees.
    """

    def __init__(self, model_runner: Any) -> None:
        if not current_platform.is_cpu() or model_runner.uses_mrope:
            raise RuntimeError("drafts can be trees in vLLM's CPU engine only: set spec.trees=false")
        self._parents: dict[str, list[int]] = {}  # of the newest drafts, by request id
        self._runner = model_runner
        self._step: dict[int, RowTree] = {}  # rows of the running step whose drafts branch
        self._layers = attention_of_trees(model_runner, lambda: self._step)
        model_runner._prepare_inputs = partial(self._prepare, model_runner._prepare_inputs)
        model_runner.rejection_sampler.forward = partial(self._sample, model_runner.rejection_sampler.forward)

    def expect(self, request_ids: Sequence[str], drafts: list[list[int]], parents: np.ndarray) -> None:
        """Announce drafts, int16 [rows, K] `parents`. If a request cannot be sampled by walking, all become paths."""
        may_branch = can_draw(self._runner.input_batch.sampling_metadata)
        self._parents = {}
        for request_id, draft, found in zip(request_ids, drafts, parents, strict=False):
            its = found[: len(draft)].tolist()
            if not may_branch:
                while its != list(range(ROOT, len(its) - 1)):
                    its.pop()
                    draft.pop()
            self._parents[request_id] = its

    def _prepare(self, prepare: Any, scheduler_output: Any, *arguments: Any, **others: Any) -> Any:
        result = prepare(scheduler_output, *arguments, **others)
        runner = self._runner
        positions = getattr(runner.positions, "gpu", runner.positions)
        self._step = {}
        for row, request_id in enumerate(runner.input_batch.req_ids):
            tokens = scheduler_output.scheduled_spec_decode_tokens.get(request_id, ())
            start, computed = runner.query_start_loc.np[row], runner.input_batch.num_computed_tokens_cpu[row]
            parents = self._parents.get(request_id, [])[: len(tokens)]  # the scheduler may have cut the draft
            if len(parents) < len(tokens):
                continue
            tree = RowTree(int(start), int(computed), tokens, parents)
            if tree.branches:
                positions[tree.start + 1 : tree.end] = tree.positions()
                self._step[row] = tree
        return result

    def _sample(self, verify: Any, metadata: Any, draft_probs: Any, logits: Any, sampling_metadata: Any) -> Any:
        if not self._step:
            return verify(metadata, draft_probs, logits, sampling_metadata)
        if not can_draw(sampling_metadata):
            # A request has joined since the trees were drafted: nothing of any draft is accepted in this step.
            ends = metadata.cu_num_sampled_tokens.tolist()
            newest = [end - 1 - count for end, count in zip(ends, metadata.num_draft_tokens, strict=True)]
            return self._runner.sampler(logits=logits[newest], sampling_metadata=sampling_metadata)
        sampler = self._runner.rejection_sampler
        output, accepted = sample(sampler, metadata, logits, sampling_metadata, self._step)
        for row, tree in self._step.items():
            moves = [(i, place) for place, i in enumerate(accepted[row]) if i != place]
            if moves:
                first = tree.computed + 1  # of the draft
                sources, targets = ([first + i for i in side] for side in zip(*moves, strict=True))
                for layer in self._layers:
                    layer.move(row, sources, targets)
        return output
