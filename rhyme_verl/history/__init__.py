"""Earlier answers per prompt: kept across replicas, steps and restarts, and delivered to the engines that draft.

`store` keeps the answers, `snapshot` saves them to disk, `actors` and `client` run the store in Ray. `server_history`
is the rollout server's side, `trajectories` matches requests to answers, and `feed` sends answers to the engine.
"""
