#!/usr/bin/env bash
# gpu_check.sh [PART ...] [--device cpu]: what one GPU shows of rhyme_verl, at most 30 minutes in all.
# Parts: setup contract small large table (all, in this order, by default), of at most 0, 5, 9, 14 and 1 minutes. Every
# engine that has been measured is kept in runs/gpu_check, so a part that was stopped goes on when it is run again. Needs
# vLLM and its CUDA build of torch in the Python that PYTHON names (default: python3); --device cpu tries the check itself.
set -euo pipefail
cd "$(dirname "$0")/../.."
python=${PYTHON:-python3}
parts=() options=()
while [ $# -gt 0 ]; do
  case $1 in
    -h | --help) sed -n '2,5s/^# //p' "$0"; exit 0 ;;
    --*) options+=("$1" "${2:?$1 needs a value}"); shift 2 ;;
    *) parts+=("$1"); shift ;;
  esac
done
[ ${#parts[@]} -gt 0 ] || parts=(setup contract small large table)
declare -A seconds=([contract]=300 [small]=540 [large]=840 [table]=60)

setup() {
  "$python" -c 'import vllm, torch; print("vllm", vllm.__version__, "torch", torch.__version__)'
  "$python" -c 'import rhyme_verl._core' 2>/dev/null || "$python" -m pip install -q --no-deps --no-build-isolation -e .
  command -v nvidia-smi >/dev/null && nvidia-smi --query-gpu=name,memory.total,driver_version --format=csv,noheader || true
}

status=0
for part in "${parts[@]}"; do
  case $part in
    setup) setup ;;
    contract | small | large | table)
      timeout "${seconds[$part]}" "$python" -m benchmarks.engines.gpu_check "$part" "${options[@]}" || {
        status=$?
        echo "gpu_check.sh: $part ended with $status (124: it took too long; run it again to go on)" >&2
      } ;;
    *) echo "gpu_check.sh: no part $part: choose from setup contract small large table" >&2; exit 2 ;;
  esac
done
exit "$status"
