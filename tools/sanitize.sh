#!/usr/bin/env bash
# sanitize.sh [DRAFT_CALLS]: builds the C++ core with AddressSanitizer and UBSan, and with ThreadSanitizer. With each,
# tests/sanitize/fuzz.cpp makes DRAFT_CALLS draft calls (default 500,000) while another thread adds answers.
set -euo pipefail
cd "$(dirname "$0")/.."
calls=${1:-500000}
compiler=${CXX:-c++}
out=build/sanitize
mkdir -p "$out"
sources=(tests/sanitize/fuzz.cpp)
for file in rhyme_verl/csrc/*.cpp; do
  [ "$(basename "$file")" = module.cpp ] || sources+=("$file")
done

run() {  # name, seed, flags
  local name=$1 seed=$2
  shift 2
  "$compiler" -std=c++20 -O1 -g -fno-omit-frame-pointer -D_GLIBCXX_ASSERTIONS -Irhyme_verl/csrc "$@" "${sources[@]}" \
    -pthread -o "$out/fuzz-$name"
  echo "sanitize: $name, $calls draft calls" >&2
  "$out/fuzz-$name" "$calls" "$seed"
}
run address 1 -fsanitize=address,undefined -fno-sanitize-recover=all
run thread 2 -fsanitize=thread
