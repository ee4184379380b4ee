#!/usr/bin/env bash
# clang-tidy over the C++ core; the checks are in .clang-tidy.
set -euo pipefail
cd "$(dirname "$0")/.."
python=.venv/bin/python
uv=.venv/bin/uv
. tools/sources.sh
wanted='clang-tidy>=18,<24'
if [ ! -x .venv/bin/clang-tidy ]; then
  install "${sources[@]}" "$wanted" 2>/dev/null || "$python" -m pip install -q --disable-pip-version-check "$wanted" || {
    echo "clang_tidy.sh: $wanted cannot be installed here; the C++ core was NOT checked" >&2
    exit 0
  }
fi
includes=$("$python" -c 'import pybind11, sysconfig; print(pybind11.get_include(), sysconfig.get_path("include"))')
.venv/bin/clang-tidy --quiet rhyme_verl/csrc/*.cpp -- -std=c++20 $(printf -- '-isystem %s ' $includes) 2>/dev/null
