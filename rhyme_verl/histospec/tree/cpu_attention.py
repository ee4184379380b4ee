"""Attention of trees in vLLM's CPU engine.

Its kernel knows causal attention only and packs keys and values in a format of its own, so a plain copy of both is kept
beside its cache, and the rows of trees are computed again in torch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch

from rhyme_verl.histospec.tree.tree import RowTree

Trees = Callable[[], dict[int, RowTree]]  # of the running step, by row


class TreeAttention:
    """Takes the place of an attention layer's two operations: writing to the cache, and attention.

    Raises:
        RuntimeError: the layer's attention is not plain causal attention over all tokens.
    """

    def __init__(self, layer: Any, trees: Trees) -> None:
        impl = layer.impl
        is_plain = impl.sliding_window == -1 or impl.sliding_window == (-1, -1)
        is_plain &= impl.alibi_slopes is None and not impl.logits_soft_cap and impl.sinks is None
        is_plain &= not impl.kv_cache_dtype.startswith("fp8")
        if not is_plain:
            raise RuntimeError("drafts cannot be trees with this model's attention: set spec.trees=false")
        self._layer, self._impl, self._trees = layer, impl, trees
        self._keys = self._values = torch.empty(0)  # [slots, heads, head size]
        self._slots: dict[int, torch.Tensor] = {}  # of the step's trees, by row: of the context and of the tree
        self._write, self._attend = impl.do_kv_cache_update, impl.forward
        impl.do_kv_cache_update, impl.forward = self._update, self._forward

    def move(self, row: int, sources: list[int], targets: list[int]) -> None:
        """Copy the keys and values of a row, by index of the token in its request."""
        slots = self._slots[row]
        source, target = slots[sources], slots[targets]
        keys, values = self._keys[source], self._values[source]  # copies
        self._update(self._layer, keys, values, self._cache, target)

    def _update(self, layer: Any, key: Any, value: Any, kv_cache: Any, slot_mapping: Any) -> None:
        self._write(layer, key, value, kv_cache, slot_mapping)
        self._cache = kv_cache
        num_slots = kv_cache.shape[0] * kv_cache.shape[2]
        if len(self._keys) != num_slots:
            self._keys = torch.zeros(num_slots, *key.shape[1:], dtype=key.dtype)
            self._values = torch.zeros(num_slots, *value.shape[1:], dtype=value.dtype)
        used = slot_mapping >= 0
        slots = slot_mapping[used]
        self._keys[slots] = key[: len(used)][used]
        self._values[slots] = value[: len(used)][used]

    def _forward(
        self, layer: Any, query: Any, key: Any, value: Any, kv_cache: Any, attn_metadata: Any, output: Any, *more: Any,
        **others: Any,
    ) -> Any:  # fmt: skip
        result = self._attend(layer, query, key, value, kv_cache, attn_metadata, output, *more, **others)
        trees = {} if attn_metadata is None else self._trees()
        for row, tree in trees.items():
            tokens = torch.arange(tree.computed + tree.end - tree.start)
            size = kv_cache.shape[2]
            slots = (attn_metadata.block_table[row][tokens // size] * size + tokens % size).long()
            self._slots[row] = slots
            found = self._attention(query[tree.start : tree.end], self._keys[slots], self._values[slots], tree)
            place = output[tree.start : tree.end]
            place.copy_(found.reshape(place.shape))
        return result

    def _attention(self, query: Any, keys: Any, values: Any, tree: RowTree) -> torch.Tensor:
        """Return the attention of a tree's tokens, [tokens, heads, head size]; the first is the row's newest token."""
        shared = self._impl.num_heads // self._impl.num_kv_heads
        heads = [tensor.float().transpose(0, 1) for tensor in (query, keys, values)]
        query, keys, values = heads[0], *(tensor.repeat_interleave(shared, 0) for tensor in heads[1:])
        seen = torch.cat([torch.ones(query.shape[1], tree.computed, dtype=torch.bool), tree.ancestors()], 1)
        weights = (query @ keys.transpose(1, 2) * self._impl.scale).masked_fill(~seen, float("-inf")).softmax(-1)
        return (weights @ values).transpose(0, 1)


def attention_of_trees(model_runner: Any, trees: Trees) -> list[TreeAttention]:
    """Make all attention layers of a model runner compute the trees of the running step."""
    layers: Iterable[Any] = model_runner.compilation_config.static_forward_context.values()
    return list(map(partial(TreeAttention, trees=trees), (layer for layer in layers if hasattr(layer, "impl"))))
