"""A word-level tokenizer of a few hundred tokens for the quickstart problems.

Words keep their leading space and digits stand alone, so `decode(encode(text)) == text` for everything `problems.py`
writes, and arithmetic is learnt digit by digit. Words it has never seen become `<|unk|>`. The special tokens are
ChatML's, because verl picks its turn handling by `model_type` and for `qwen2` requires `<|im_end|>` and a one-token
newline.
"""

import json
import re
from collections.abc import Iterable
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from examples.quickstart.problems import QUICKSTART, Task, make_problem

TOKENIZER_CLASS = "PreTrainedTokenizerFast"  # belongs into the model's config.json, see `save_tokenizer`
PIECE = r" ?[A-Za-z]+| ?[^\sA-Za-z0-9]+|[0-9]|\s"  # covers every character exactly once
EOS, PAD, UNK, START = "<|im_end|>", "<|endoftext|>", "<|unk|>", "<|im_start|>"
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' }}"
    "{% if message['content'] is string %}{{ message['content'] }}"
    "{% else %}{% for part in message['content'] %}{{ part['text'] }}{% endfor %}{% endif %}"
    "{{ '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
NUM_VOCABULARY_PROBLEMS = 3000  # each word of problems.py appears hundreds of times in these


def collect_words(texts: Iterable[str]) -> list[str]:
    """Every piece that occurs in the texts, sorted, so that token ids do not depend on their order."""
    return sorted({piece for text in texts for piece in re.findall(PIECE, text)})


def build_tokenizer(task: Task = QUICKSTART) -> PreTrainedTokenizerFast:
    """The tokenizer of a task's policy: a pure function of `problems.py` and this file."""
    problems = (make_problem("vocabulary", 0, index, task) for index in range(NUM_VOCABULARY_PROBLEMS))
    words = collect_words(f"{problem.question}\n{problem.answer}" for problem in problems)
    tokens = dict.fromkeys([PAD, START, EOS, UNK, "system", "user", "assistant", *"0123456789", *words])
    backend = Tokenizer(models.WordLevel({token: index for index, token in enumerate(tokens)}, unk_token=UNK))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(PIECE), behavior="isolated")
    backend.decoder = decoders.Fuse()
    backend.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in (PAD, START, EOS, UNK)])
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        eos_token=EOS,
        pad_token=PAD,
        unk_token=UNK,
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
        model_max_length=2048,
    )


def save_tokenizer(tokenizer: PreTrainedTokenizerFast, directory: Path) -> None:
    """Saves so that `AutoTokenizer` restores this tokenizer and not Qwen's.

    Given a `tokenizer_class` in `tokenizer_config.json`, transformers 5 rebuilds the tokenizer of a `qwen2` checkpoint
    as `Qwen2Tokenizer` with its own byte-level rules, without an error. Without one it takes `config.json`'s class.
    """
    tokenizer.save_pretrained(directory)
    path = directory / "tokenizer_config.json"
    config = json.loads(path.read_text(encoding="utf-8"))
    del config["tokenizer_class"]
    path.write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
