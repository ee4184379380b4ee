"""HistoPipe: schedule rollouts by the lengths of earlier answers.

`lengths` predicts, `planner` shares a step's work out over the replicas, `binder` hands it out as replicas get room.
All are pure objects that know neither verl, vLLM nor Ray; the router and the simulator run the same code.
"""
