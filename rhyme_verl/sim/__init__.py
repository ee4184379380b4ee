"""A cluster of rollout replicas, simulated by discrete events, to compare schedulers at sizes nobody has at hand.

`workload` makes the lengths, `cluster` plays the engines, `trainer` plays verl, `systems` decide who runs what
(HistoPipe is the production code), `experiment` sums up and `gantt` draws. Knows nothing of verl, vLLM or Ray.
"""
