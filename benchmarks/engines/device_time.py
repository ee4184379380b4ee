"""How long an engine step takes on the modelled accelerator: the published forward pass, and the sampling after it.

The published times end with the forward pass. What follows is the model's last layer, which makes the logits, vLLM's
sampler, and with drafts its rejection sampler. Their time is computed, not measured: from the operations of the last
layer, or from the bytes that vLLM 0.28 reads and writes with log-probs of sampled tokens (verl's default), one kernel
after another, in float32 except for the model's logits. With log-probs, rows of logits are padded to the longest draft.
"""

from __future__ import annotations

from rhyme_verl.sim.step_times import PublishedStepTime

LAST_LAYERS = {  # hidden size and vocabulary
    "qwen2.5-7b": (3584, 152_064),
    "llama-3.1-8b": (4096, 128_256),
    "qwen2.5-14b": (5120, 152_064),
}
# A100-80GB: 2.04 TB/s and 312 TFLOPS (bfloat16), of which large kernels reach these shares.
BYTES_PER_SECOND = 0.85 * 2.04e12
FLOPS = 0.6 * 312e12
# Bytes per id of the vocabulary.
UNDRAFTED_ROW = 54  # to float32 6, temperature 8, softmax 8, noise 4, division 12, argmax 4, log-softmax 8, rank 4
DRAFTED_ROW = 58  # a copy 4, the same without log-softmax and rank 42, the row's part of the logits to score 12
DRAFT_TOKEN = 42  # a copy 4, to float32 6, temperature 8, softmax 8, the token in its place 4, logits to score 12
PADDED_ROW = 20  # of rows x (longest draft + 1): a copy 8, log-softmax 8, rank 4


class DeviceTime:
    """Seconds of an engine step on one A100.

    Raises:
        ValueError: the model is unknown.
    """

    def __init__(self, model: str) -> None:
        self._forward = PublishedStepTime(model)
        self._hidden, self._vocabulary = LAST_LAYERS[model]

    def seconds(
        self, rows: int, num_tokens: int, context: float, drafted: int | None = None, longest: int | None = None
    ) -> float:
        """Return the seconds of one step.

        Args:
            rows, num_tokens, context: see `PublishedStepTime.seconds`.
            drafted: draft tokens in the step; by default all tokens but one per row.
            longest: tokens of the longest draft; by default all drafts are equally long.
        """
        if drafted is None:
            drafted = num_tokens - rows
        if longest is None:
            longest = -(-drafted // max(1, rows))
        return self._forward.seconds(rows, num_tokens, context) + self.sampling_seconds(rows, drafted, longest)

    def sampling_seconds(self, rows: int, drafted: int, longest: int) -> float:
        """Return the seconds after a step's forward pass; `longest`: tokens of the longest draft."""
        weights = 2 * self._hidden * self._vocabulary  # bytes; as many operations per row of logits
        logits = max(weights / BYTES_PER_SECOND, weights * (rows + drafted) / FLOPS)
        bytes_per_id = rows * UNDRAFTED_ROW
        if drafted:
            bytes_per_id = rows * DRAFTED_ROW + drafted * DRAFT_TOKEN + rows * (1 + longest) * PADDED_ROW
        return logits + bytes_per_id * self._vocabulary / BYTES_PER_SECOND
