#!/usr/bin/env bash
# Adds to .venv what the benchmarks need in addition to the demo: the `bench` extra, and ArcticInference (the suffix
# decoding of vLLM's `suffix` method), built from source. Does nothing if nothing has changed. Run tools/setup.sh first.
set -euo pipefail
cd "$(dirname "$0")/.."
venv=.venv
python=$venv/bin/python
arctic_version=0.3.0

say() { echo "setup: $*" >&2; }
fail() { say "$*"; exit 1; }

stamp=$venv/.rhyme-setup-bench
state=$(cat setup.py tools/setup_bench.sh "$venv/.rhyme-setup" | cksum)
if [ -f "$stamp" ] && [ "$(cat "$stamp")" = "$state" ]; then exit 0; fi

mapfile -t requirements < <("$python" - <<'PYTHON'
from importlib.metadata import requires

for line in requires("rhyme_verl"):
    requirement, _, marker = line.partition(";")
    if marker.strip() in ('extra == "bench"', "extra == 'bench'"):
        print(requirement.strip())
PYTHON
)
"$python" -m pip install -q --disable-pip-version-check "${requirements[@]}"
if ! "$python" -c "import importlib.metadata as m, sys; sys.exit(m.version('arctic-inference') != '$arctic_version')" 2>/dev/null; then
  say "building ArcticInference $arctic_version"
  # Its build needs these in addition to torch; with build isolation, it would download another torch.
  "$python" -m pip install -q --disable-pip-version-check 'cmake>=3.18' grpcio-tools 'nanobind>=2' ninja wheel
  PATH="$PWD/$venv/bin:$PATH" "$python" -m pip install -q --disable-pip-version-check --no-deps --no-build-isolation \
    "arctic-inference==$arctic_version" || fail "ArcticInference $arctic_version did not build; is there a C++ compiler?"
fi
"$python" -c 'from arctic_inference.suffix_decoding import SuffixDecodingCache' || fail "ArcticInference was built but does not load"
echo "$state" >"$stamp"
