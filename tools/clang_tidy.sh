#!/usr/bin/env bash
# Runs clang-tidy on the C++ core with the checks of .clang-tidy.
set -euo pipefail
cd "$(dirname "$0")/.."
[ -x .venv/bin/clang-tidy ] || .venv/bin/uv pip install -q --python .venv/bin/python 'clang-tidy>=18,<24'
INCLUDES=$(.venv/bin/python -c 'import pybind11, sysconfig; print(pybind11.get_include(), sysconfig.get_path("include"))')
.venv/bin/clang-tidy --quiet rhyme_verl/csrc/*.cpp -- -std=c++17 $(printf -- '-isystem %s ' $INCLUDES) 2>/dev/null
