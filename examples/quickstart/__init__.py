"""The quickstart job: a small task, tokenizer and policy that need no GPU and no download."""
