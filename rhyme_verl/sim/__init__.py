"""A cluster of rollout replicas, simulated by discrete events, to compare schedulers at sizes nobody has at hand.

`workload` makes the lengths, `cluster` plays the engines, `policies` decide who runs what, `trainer` opens the steps,
`report` sums up and `gantt` draws. Knows nothing of verl, vLLM or Ray.
"""
