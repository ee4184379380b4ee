"""Measures a policy on held-out problems: accuracy, answer lengths, entropy, and the share of mixed outcomes.

Sampling is a small batched loop over Hugging Face's model (full softmax at temperature 1.0), so the entropy is exact
and only transformers is needed. Usage: `python -m examples.quickstart.evaluation --policy DIR`.
"""

import argparse
import dataclasses
import json
from pathlib import Path

import numpy as np
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from examples.quickstart.problems import QUICKSTART, Task, make_problem

BATCH_SEQUENCES = 128


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sample:
    """One sampled answer."""

    text: str
    num_tokens: int  # including the end-of-turn token
    finished: bool  # ended before the token limit
    mean_entropy: float  # nats per token of the policy's next-token distribution


@torch.inference_mode()
def sample_answers(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    questions: list[str],
    max_tokens: int,
    generator: torch.Generator,
) -> list[Sample]:
    """Sample one answer per question at temperature 1.0, in one left-padded batch."""
    chats = [[{"role": "user", "content": question}] for question in questions]
    inputs = tokenizer.apply_chat_template(
        chats, add_generation_prompt=True, padding=True, padding_side="left", return_tensors="pt", return_dict=True
    )
    ids, mask = inputs["input_ids"], inputs["attention_mask"]
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    rows = torch.arange(len(questions))  # the unfinished question of each batch row
    tokens: list[list[int]] = [[] for _ in questions]
    entropy_sums = torch.zeros(len(questions))
    cache = None
    for _ in range(max_tokens):
        output = model(
            input_ids=ids, attention_mask=mask, position_ids=positions, past_key_values=cache, use_cache=True
        )
        cache = output.past_key_values
        log_probs = output.logits[:, -1].float().log_softmax(-1)
        probs = log_probs.exp()
        entropy_sums[rows] -= (probs * log_probs).sum(-1)
        ids = torch.multinomial(probs, 1, generator=generator)
        for row, token in zip(rows.tolist(), ids[:, 0].tolist(), strict=True):
            tokens[row].append(token)
        mask = torch.cat([mask, torch.ones_like(ids)], dim=-1)
        positions = positions[:, -1:] + 1
        unfinished = (ids[:, 0] != tokenizer.eos_token_id).nonzero()[:, 0]
        if len(unfinished) == 0:
            break
        if len(unfinished) < len(rows):
            cache.batch_select_indices(unfinished)
            ids, mask, positions, rows = ids[unfinished], mask[unfinished], positions[unfinished], rows[unfinished]

    return [
        Sample(
            text=tokenizer.decode(answer, skip_special_tokens=True),
            num_tokens=len(answer),
            finished=answer[-1] == tokenizer.eos_token_id,
            mean_entropy=entropy_sum / len(answer),
        )
        for answer, entropy_sum in zip(tokens, entropy_sums.tolist(), strict=True)
    ]


def is_correct(answer: str, ground_truth: str) -> bool:
    """Apply the strict GSM8K rule: the answer's last line is `#### <number>`."""
    return answer.rpartition("#### ")[2].strip() == ground_truth and "#### " in answer


def evaluate(
    policy: Path,
    *,
    task: Task = QUICKSTART,
    num_problems: int = 64,
    samples_per_problem: int = 8,
    max_tokens: int = 400,
    seed: int = 0,
) -> dict:
    """Return the policy's results on problems 0 to num_problems - 1 of the test split."""
    model = AutoModelForCausalLM.from_pretrained(policy, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(policy)
    indices = [index for index in range(num_problems) for _ in range(samples_per_problem)]
    problems = [make_problem("test", seed, index, task) for index in indices]
    generator = torch.Generator().manual_seed(seed)
    samples = []
    for start in range(0, len(problems), BATCH_SEQUENCES):
        questions = [problem.question for problem in problems[start : start + BATCH_SEQUENCES]]
        samples += sample_answers(model, tokenizer, questions, max_tokens, generator)

    correct = np.array([is_correct(s.text, p.ground_truth) for s, p in zip(samples, problems, strict=True)])
    num_correct = correct.reshape(num_problems, samples_per_problem).sum(1)
    lengths = np.array([sample.num_tokens for sample in samples])
    entropy = sum(sample.mean_entropy * sample.num_tokens for sample in samples) / lengths.sum()
    return {
        "num_problems": num_problems,
        "samples_per_problem": samples_per_problem,
        "temperature": 1.0,
        "accuracy": round(float(correct.mean()), 4),
        "mixed_outcome_share": round(float(((num_correct > 0) & (num_correct < samples_per_problem)).mean()), 4),
        "problems_by_num_correct": np.bincount(num_correct, minlength=samples_per_problem + 1).tolist(),
        "finished_share": round(float(np.mean([sample.finished for sample in samples])), 4),
        "answer_tokens": {
            "mean": round(float(lengths.mean()), 1),
            "median": float(np.median(lengths)),
            "p99": round(float(np.percentile(lengths, 99)), 1),
            "max": int(lengths.max()),
        },
        "entropy_nats_per_token": round(float(entropy), 4),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--policy", type=Path, default=Path("examples/quickstart/policy"), help="policy folder (default: %(default)s)"
    )
    parser.add_argument("--num-problems", type=int, default=64, help="held-out problems (default: %(default)s)")
    parser.add_argument("--samples-per-problem", type=int, default=8, help="answers per problem (default: %(default)s)")
    args = parser.parse_args()
    figures = evaluate(args.policy, num_problems=args.num_problems, samples_per_problem=args.samples_per_problem)
    print(json.dumps(figures, indent=2))


if __name__ == "__main__":
    main()
