"""HistoPipe: schedule rollouts by the lengths of earlier answers.

`lengths` predicts, `planner` shares a step's work out over the replicas (`ranges` cuts it, by `step_cost`'s table),
`binder` hands it out as replicas get room, and `migration` says what is worth moving. All are pure and know neither
verl, vLLM nor Ray; the router and the simulator run the same code.
"""
