#!/usr/bin/env bash
# Installs what `make test-report` needs in addition to .venv: Chromium with its driver (Debian packages, as root) and
# selenium. Does nothing if they are installed. Run tools/setup.sh first.
set -euo pipefail
cd "$(dirname "$0")/.."

say() { echo "setup: $*" >&2; }
fail() { say "$*"; exit 1; }

if ! { command -v chromium && command -v chromedriver; } >/dev/null; then
  [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null || fail "chromium and chromedriver are needed (Debian: chromium, chromium-driver)"
  say "installing chromium"
  { apt-get update -qq && apt-get install -y -qq chromium chromium-driver; } >/dev/null || fail "chromium could not be installed"
fi
.venv/bin/python -c 'import selenium' 2>/dev/null || .venv/bin/python -m pip install -q --disable-pip-version-check 'selenium>=4.20,<5'
