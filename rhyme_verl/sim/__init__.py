"""Discrete-event simulation of a cluster of rollout replicas, to compare schedulers at sizes that cannot be measured.

`workload` provides the lengths, `cluster` models the engines and `trainer` verl's trainer, `systems` are the schedulers
(HistoPipe is the production code), `experiment` measures. Does not depend on verl, vLLM or Ray.
"""
