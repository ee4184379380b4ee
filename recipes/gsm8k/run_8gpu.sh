#!/usr/bin/env bash
# One node of 8 GPUs. Arguments are Hydra overrides: rhyme=baseline, actor_rollout_ref.model.path=..., ...
set -euo pipefail
cd "$(dirname "$0")/../.."
exec python -m verl.trainer.main_ppo --config-path="$PWD/recipes" --config-name=gsm8k/gsm8k hardware=node "$@"
