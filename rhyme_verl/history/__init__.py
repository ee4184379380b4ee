"""What is remembered of each prompt, across replicas, steps and restarts, and how it reaches the engines that draft.

`store` decides, `snapshot` puts it on disk, `actors` and `client` run it in Ray; `replica` is a rollout server's part,
`trajectories` tells what belongs together, and `feed` brings answers into the engine.
"""
