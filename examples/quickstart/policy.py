"""Trains the quickstart policy, a Qwen2 of 1.6M parameters that solves some of the problems, in minutes on two cores.

Plain supervised next-token loss on reference answers, from random weights. The result is an ordinary Hugging Face
checkpoint plus `recipe.json`, which names the exact sources and hyperparameters that made it, so that a stale policy is
noticed (`is_current`). Knows nothing of verl and vLLM; how the policy behaves is measured in `evaluation.py`.
"""

import argparse
import copy
import dataclasses
import hashlib
import inspect
import json
import random
import sys
import time
from collections.abc import Mapping
from pathlib import Path

import torch
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoTokenizer, GenerationConfig, PreTrainedTokenizerBase, Qwen2Config, Qwen2ForCausalLM

from examples.quickstart.evaluation import evaluate
from examples.quickstart.problems import QUICKSTART, Task, make_problem
from examples.quickstart.tokenizer import TOKENIZER_CLASS, build_tokenizer, save_tokenizer

RECIPE_FILE = "recipe.json"
IGNORED_LABEL = -100  # positions without loss, the value Hugging Face models skip
FINGERPRINT_STRIDE = 40  # every so many-th training problem goes into the fingerprint
REPOSITORY = Path(__file__).parents[2]
SHIPPED_POLICY = REPOSITORY / "examples/quickstart/policy"
LENGTH_BUCKET_BATCHES = 32  # batches that are sorted by length together, to save padding


@dataclasses.dataclass(frozen=True, kw_only=True)
class Hyperparameters:
    """Everything about the training run that is a number, and the task that is taught."""

    task: Task = QUICKSTART
    hidden_size: int = 192
    intermediate_size: int = 512
    num_layers: int = 4
    num_heads: int = 6
    num_kv_heads: int = 2
    num_problems: int = 44_000
    num_steps: int = 2_800
    batch_size: int = 16
    max_learning_rate: float = 2e-3
    weight_decay: float = 0.01
    max_grad_norm: float = 1.0
    seed: int = 0
    num_threads: int = 2
    bf16: bool = False  # matrix products in bfloat16: twice as fast where the processor has them
    starts_from_quickstart: bool = False  # from the shipped quickstart policy instead of random weights


def fingerprint(hyperparameters: Hyperparameters) -> str:
    """Hash over all that determines the files of a policy: problems, tokenizer, training code and hyperparameters."""
    hp = hyperparameters
    sample = range(0, hp.num_problems, FINGERPRINT_STRIDE)
    made_by = [repr(make_problem("policy", hp.seed, index, hp.task)) for index in sample]
    made_by.append(build_tokenizer(hp.task).backend_tokenizer.to_str())
    made_by += [inspect.getsource(function) for function in (encode_example, make_batches, train, load_weights, save)]
    made_by.append(json.dumps(dataclasses.asdict(hp), sort_keys=True))
    return hashlib.sha256("\0".join(made_by).encode()).hexdigest()


def is_current(directory: Path, hyperparameters: Hyperparameters = Hyperparameters()) -> bool:  # noqa: B008 (frozen)
    """Whether the folder holds a policy made by exactly these sources with these hyperparameters."""
    recipe = directory / RECIPE_FILE
    if not recipe.is_file() or not (directory / "model.safetensors").is_file():
        return False
    return json.loads(recipe.read_text(encoding="utf-8"))["fingerprint"] == fingerprint(hyperparameters)


def encode_example(tokenizer: PreTrainedTokenizerBase, question: str, answer: str) -> tuple[list[int], list[int]]:
    """Input ids and labels of one problem; only the answer and its end-of-turn token carry loss."""
    chat = [{"role": "user", "content": question}]
    prompt = tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=True, return_dict=False)
    target = [*tokenizer.encode(answer), tokenizer.eos_token_id]
    return prompt + target, [IGNORED_LABEL] * len(prompt) + target


def make_batches(examples: list, batch_size: int, num_steps: int, rng: random.Random):
    """Yields `num_steps` batches of similar length in random order, passing over the examples as often as needed."""
    bucket = batch_size * LENGTH_BUCKET_BATCHES
    made = 0
    while True:
        rng.shuffle(examples)
        for start in range(0, len(examples) - bucket + 1, bucket):
            by_length = sorted(examples[start : start + bucket], key=lambda example: len(example[0]))
            batches = [by_length[i : i + batch_size] for i in range(0, bucket, batch_size)]
            rng.shuffle(batches)
            for batch in batches:
                if made == num_steps:
                    return
                made += 1
                yield batch


def train(
    hyperparameters: Hyperparameters,
    tokenizer: PreTrainedTokenizerBase,
    examples: list[tuple[list[int], list[int]]],
    save_at: Mapping[int, Path] | None = None,
) -> Qwen2ForCausalLM:
    """Trains in float32; the same arguments on the same machine give the same weights.

    Args:
        hyperparameters: of the model and of its training.
        tokenizer: for vocabulary and special tokens.
        examples: input ids and labels, see `encode_example`.
        save_at: folders for checkpoints on the way, by training step.
    """
    hp = hyperparameters
    torch.manual_seed(hp.seed)
    torch.set_num_threads(hp.num_threads)
    model = Qwen2ForCausalLM(
        Qwen2Config(
            vocab_size=len(tokenizer),
            hidden_size=hp.hidden_size,
            intermediate_size=hp.intermediate_size,
            num_hidden_layers=hp.num_layers,
            num_attention_heads=hp.num_heads,
            num_key_value_heads=hp.num_kv_heads,
            max_position_embeddings=2048,
            tie_word_embeddings=True,
            bos_token_id=None,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
            tokenizer_class=TOKENIZER_CLASS,
        )
    )
    if hp.starts_from_quickstart:
        load_weights(model, tokenizer, SHIPPED_POLICY)
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.98), weight_decay=hp.weight_decay)
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, max_lr=hp.max_learning_rate, total_steps=hp.num_steps, pct_start=0.1
    )
    started = time.monotonic()
    batches = make_batches(examples, hp.batch_size, hp.num_steps, random.Random(hp.seed))
    for step, batch in enumerate(batches, start=1):
        ids = pad_sequence([torch.tensor(ids) for ids, _ in batch], True, tokenizer.pad_token_id)
        labels = pad_sequence([torch.tensor(labels) for _, labels in batch], True, IGNORED_LABEL)
        with torch.autocast("cpu", torch.bfloat16, enabled=hp.bf16):
            loss = model(input_ids=ids, labels=labels).loss  # right padding needs no mask: attention is causal
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), hp.max_grad_norm)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        if step % 50 == 0 or step == hp.num_steps:
            seconds = time.monotonic() - started
            print(f"step {step}/{hp.num_steps}  loss {loss.item():.4f}  {seconds:.0f} s", flush=True)
        if step in (save_at or {}):
            save(save_at[step], copy.deepcopy(model), tokenizer)
    return model


def load_weights(model: Qwen2ForCausalLM, tokenizer: PreTrainedTokenizerBase, source: Path) -> None:
    """Copies the weights of a policy of the same shape; tokens that it does not know keep their random embeddings."""
    weights = Qwen2ForCausalLM.from_pretrained(source, dtype=torch.float32).state_dict()
    known = AutoTokenizer.from_pretrained(source).get_vocab()
    embedding = model.get_input_embeddings().weight.detach().clone()
    for token, index in tokenizer.get_vocab().items():
        if token in known:
            embedding[index] = weights["model.embed_tokens.weight"][known[token]]
    tied = {"model.embed_tokens.weight": embedding, "lm_head.weight": embedding}
    model.load_state_dict({**weights, **tied})


def save(directory: Path, model: Qwen2ForCausalLM, tokenizer: PreTrainedTokenizerBase) -> None:
    """Writes the checkpoint in bfloat16: half the size, and what engines load by default."""
    model = model.to(torch.bfloat16)
    model.generation_config = GenerationConfig(
        eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id, do_sample=True, temperature=1.0
    )
    model.save_pretrained(directory)
    save_tokenizer(tokenizer, directory)


def make(directory: Path, hyperparameters: Hyperparameters = Hyperparameters(), max_tokens: int = 400) -> dict:  # noqa: B008
    """Trains, saves and measures the policy; returns the recipe, which it also writes beside the weights."""
    made_by = fingerprint(hyperparameters)  # before the run, in case a source is edited meanwhile
    hp = hyperparameters
    tokenizer = build_tokenizer(hp.task)
    problems = [make_problem("policy", hp.seed, index, hp.task) for index in range(hp.num_problems)]
    examples = [encode_example(tokenizer, problem.question, problem.answer) for problem in problems]
    save(directory, train(hp, tokenizer, examples), tokenizer)
    recipe = {
        "fingerprint": made_by,
        "hyperparameters": dataclasses.asdict(hyperparameters),
        "evaluation": evaluate(directory, task=hyperparameters.task, max_tokens=max_tokens),
    }
    (directory / RECIPE_FILE).write_text(json.dumps(recipe, indent=2) + "\n", encoding="utf-8")
    return recipe


def run(default_folder: Path, hyperparameters: Hyperparameters, max_tokens: int) -> None:
    """The command line of a script that makes a policy."""
    parser = argparse.ArgumentParser(description="Train a small policy on worked answers, in minutes on two cores.")
    parser.add_argument("--out", type=Path, default=default_folder, help="folder of the policy (default: %(default)s)")
    parser.add_argument("--check", action="store_true", help="train nothing; exit 1 if the policy is missing or stale")
    args = parser.parse_args()
    if args.check:
        current = is_current(args.out, hyperparameters)
        print(f"{args.out}: {'current' if current else 'missing or stale'}")
        sys.exit(0 if current else 1)
    print(json.dumps(make(args.out, hyperparameters, max_tokens)["evaluation"], indent=2))


if __name__ == "__main__":
    run(SHIPPED_POLICY, Hyperparameters(), max_tokens=400)
