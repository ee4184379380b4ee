# Sourced by the set-up scripts: where packages come from, by pip's own settings (environment or pip.conf), and
# `install`, which is uv's pip with them. Needs $python (of the environment to fill) and $uv.
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
install() { "$uv" pip install -q --python "$python" "$@"; }

# install_cpu_torch VERSION: nothing if it is there.
install_cpu_torch() {
  "$python" -c "import importlib.metadata as m, sys; sys.exit(m.version('torch').partition('+')[0] != '$1')" 2>/dev/null && return
  say "installing the CPU build of torch $1"
  { [ -n "$find_links" ] && install --no-index "${sources[@]}" --no-deps "torch==$1" 2>/dev/null; } \
    || install "${sources[@]}" --torch-backend cpu "torch==$1" \
    || fail "no CPU build of torch $1 could be had; put its wheel where PIP_FIND_LINKS points"
}
