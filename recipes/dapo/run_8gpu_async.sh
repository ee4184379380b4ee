#!/usr/bin/env bash
# One node of 8 GPUs; batches of consecutive steps are generated together. Arguments are Hydra overrides.
set -euo pipefail
cd "$(dirname "$0")/../.."
exec python -m verl.trainer.main_ppo --config-path="$PWD/recipes" --config-name=dapo/dapo hardware=node_async "$@"
