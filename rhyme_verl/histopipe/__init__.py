"""HistoPipe schedules rollouts by the lengths of earlier answers.

`scheduler` combines `units` (which groups are generated together, and when the trainer sees them), `lanes` (which
answer runs on which replica) and `lengths` (predictions). These modules are pure and do not depend on verl, vLLM or
Ray. In a job, `router` drives them as a Ray actor and exchanges `messages` with `worker_lanes`; the simulator drives
the same code.

Worked example in `colocate_async`: replicas r1 and r2 have two lanes each (`max_num_seqs=2`), a batch is one group
(G=1) of two answers, `pipe.max_age=2` with `num_warmup_batches=2`, and a unit is U=2 batches with C=1 carried group.
Every running answer generates one token per second; prefill, training and messages take no time.

    group               a         b        c        d        e
    predicted tokens    90        45       25       55       80
    tokens of answers   110, 70   40, 50   20, 30   60, 50   90, 70    (a0, a1; b0, b1; ...)

    step 1, unit 1
       0 s  verl submits a, b and c, and the unit opens U * G + C = 3 groups. The longest predictions get lanes first,
            each on the replica with the fewest held lanes: a0 and b0 on r1, a1 and b1 on r2. While answers wait, some
            are queued in a replica's engine, up to about 20 % of its predicted tokens: c0 in that of r1, c1 in r2.
      40 s  b0 ends, so r1 starts c0.
      50 s  b1 ends, and group b is finished. r2 starts c1.
      60 s  c0 ends.
      70 s  a1 ends.
      80 s  c1 ends, and group c is the second of U * G = 2 finished groups. Group a can still be trained in step 3,
            with age 3 - 1 = 2, so the unit is released without it: b is published, c is withheld, and a0 is parked
            with 80 of its 110 tokens. The trainer takes b (age 0), then c is published.
            The unit's report: 5 answers, 210 tokens, 80 s, 1 group carried. Lanes were held for 140 s on r1 and for
            150 s on r2, of 2 * 80 s each: the bubble is 1 - 290 / 320 = 9.4 %.
    step 2  verl submits d, which is not opened. The trainer takes c at once (age 1). Nothing is generated.
    step 3, unit 2 (times from its beginning)
       0 s  verl submits e; d and e are opened in addition to a. The oldest unit gets lanes first, then the longest
            predictions: a0 on r1, e0 on r2, e1 on r1, d0 on r2, and d1 is queued in the engine of r1.
      30 s  a0 ends after its other 30 tokens, and group a is finished. r1 starts d1.
      60 s  d0 ends.
      70 s  e1 ends.
      80 s  d1 ends, and group d is finished: the unit is released, and e0 is parked with 80 of its 90 tokens. The group
            with the oldest answers is published first: the trainer takes a (age 3 - 1 = 2, the maximum).
    step 4  The trainer takes d at once (age 4 - 3 = 1). Group e continues in unit 3, which begins in step 5.
"""
