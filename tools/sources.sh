# Sourced by the setup scripts. Reads the package sources from pip's settings (environment or pip.conf) and defines
# `install`, which runs `uv pip install` with them. Needs $uv, and $python of the environment to install into.
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
[ -z "$extra" ] || sources+=(--index-strategy unsafe-best-match)  # as pip does: the best version in any index
install() { "$uv" pip install -q --python "$python" "$@"; }

# install_cpu_torch VERSION: does nothing if that version is installed.
install_cpu_torch() {
  "$python" -c "import importlib.metadata as m, sys; sys.exit(m.version('torch').partition('+')[0] != '$1')" 2>/dev/null && return
  say "installing the CPU build of torch $1"
  { [ -n "$find_links" ] && install --no-index "${sources[@]}" --no-deps "torch==$1" 2>/dev/null; } \
    || install "${sources[@]}" --torch-backend cpu "torch==$1" \
    || fail "no CPU build of torch $1 found; put its wheel where PIP_FIND_LINKS points"
}
