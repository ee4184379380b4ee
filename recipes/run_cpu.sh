#!/usr/bin/env bash
# A few steps of a recipe on one CPU machine with the quickstart policy: recipes/run_cpu.sh gsm8k|dapo DATA [overrides]
# DATA is a folder with train.parquet and test.parquet; see the recipe's README.
set -euo pipefail
recipe=${1:?give a recipe: gsm8k or dapo}
data=$(realpath "${2:?give the folder with train.parquet and test.parquet}")
shift 2
cd "$(dirname "$0")/.."
python=.venv/bin/python
[ -x "$python" ] || python=python
export VERL_PLATFORM=cpu
export VERL_ENGINE_DEVICE=cuda  # verl registers its FSDP engine as cuda; the engine itself asks the platform
export VLLM_CPU_KVCACHE_SPACE=1 VLLM_CPU_OMP_THREADS_BIND=nobind
export RAY_prestart_worker_first_driver=0  # do not start one worker process per logical CPU
export HF_HUB_OFFLINE=1
exec "$python" -m verl.trainer.main_ppo --config-path="$PWD/recipes" --config-name="$recipe/$recipe" hardware=cpu \
  data.train_files="$data/train.parquet" data.val_files="$data/test.parquet" \
  trainer.default_local_dir="$PWD/runs/$recipe/checkpoints" hydra.run.dir="$PWD/runs/$recipe/hydra" "$@"
