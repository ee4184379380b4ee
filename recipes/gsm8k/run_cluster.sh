#!/usr/bin/env bash
# Several nodes of 8 GPUs, on the head node of a running Ray cluster (after `ray start` on every node).
# TRAIN_NODES and ROLLOUT_NODES are the numbers of training and rollout nodes. Arguments are Hydra overrides.
set -euo pipefail
cd "$(dirname "$0")/../.."
exec python -m verl.trainer.main_ppo --config-path="$PWD/recipes" --config-name=gsm8k/gsm8k hardware=cluster \
  trainer.nnodes="${TRAIN_NODES:-1}" actor_rollout_ref.rollout.nnodes="${ROLLOUT_NODES:-1}" "$@"
