"""HistoPipe: rollouts scheduled by the lengths of earlier answers.

`scheduler` puts together `units` (which groups are generated together, and when the trainer sees them), `lanes` (which
answer runs on which replica) and `lengths` (predictions). These are pure and know neither verl, vLLM nor Ray. In a job
`router` drives them as a Ray actor and talks to `worker_lanes` in `messages`; the simulator drives the same code.

An example: two replicas with two lanes each, batches of two groups with one answer each, `max_age` 2, units of two
batches with one group carried. Predicted lengths are 100 (a), 50 (b), 40 (c), 20 (d) and 10 (e); true ones are alike.

    step 1  five groups are open. a and b start on replica 1 and 2, c and d beside them, e waits for a lane
            after 20 tokens d ends and e starts in its lane; after 30, 40 and 50 tokens e, c and b end
            four groups are finished: they are published, a is carried and parked; the trainer takes two of them
    step 2  the trainer takes the other two at once
    step 3  four more groups are opened; a goes first, with 50 tokens recomputed and 50 to go, and is trained in this
            step: two weight updates after its first token
"""
