"""HistoSpec: drafts from earlier answers to a prompt, verified by the current model.

`proposer` has the class that vLLM loads. The compiled core (`csrc`) chooses the draft tokens.
"""
