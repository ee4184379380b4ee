#!/usr/bin/env bash
# NODES nodes of 8 GPUs that all train and generate, on the head node of a running Ray cluster (after `ray start` on every
# node). Batches of consecutive steps are generated together. Arguments are Hydra overrides.
set -euo pipefail
cd "$(dirname "$0")/../.."
exec python -m verl.trainer.main_ppo --config-path="$PWD/recipes" --config-name=gsm8k/gsm8k hardware=cluster_async \
  trainer.nnodes="${NODES:-2}" "$@"
