"""HistoSpec: drafts from a prompt's own earlier answers, verified by the current model.

`proposer` is the class vLLM loads; everything that decides is in the compiled core (`csrc`).
"""
