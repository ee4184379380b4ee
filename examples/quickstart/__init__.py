"""The embedded default: a tiny task, a tiny tokenizer and a tiny policy that need no GPU and no download."""
