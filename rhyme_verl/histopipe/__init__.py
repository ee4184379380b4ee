"""HistoPipe schedules rollouts by the lengths of earlier answers.

`scheduler` combines `units` (which groups are generated together, and when the trainer sees them), `lanes` (which
answer runs on which replica) and `lengths` (predictions). These modules are pure and do not depend on verl, vLLM or
Ray. In a job, `router` drives them as a Ray actor and exchanges `messages` with `worker_lanes`; the simulator drives
the same code. docs/worked-example.md shows a unit second by second.
"""
