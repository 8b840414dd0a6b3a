#!/usr/bin/env bash
# Runs a command on a GPU machine without network, from a checkout and a folder of wheels.
#
#     bench/gpu_setup.sh [-w WHEELS] [-s SITE] [-c CACHE] [-o OUT] COMMAND...
#
# WHEELS (.whl): packages for this machine's Python, and flashinfer_jit_cache.tgz if FlashInfer's operators
#   were compiled elsewhere. SITE (/tmp/site): where they are installed; a second call finds them there.
# CACHE (.gpu/cache.tgz): our own compiled kernels, from an earlier run. OUT ($OUT): a folder that gets
#   cache.tgz, those of this run, when the command has ended.
set -uo pipefail

wheels=.whl site=/tmp/site cache=.gpu/cache.tgz out=${OUT:-}
while getopts w:s:c:o: option; do
  case $option in
    w) wheels=$OPTARG ;;
    s) site=$OPTARG ;;
    c) cache=$OPTARG ;;
    o) out=$OPTARG ;;
    *) exit 2 ;;
  esac
done
shift $((OPTIND - 1))
if [ $# -eq 0 ]; then
  echo "usage: $0 [-w WHEELS] [-s SITE] [-c CACHE] [-o OUT] COMMAND..." >&2
  exit 2
fi

if [ ! -e "$site/.installed" ]; then
  python3 -m pip install -q --no-index --no-deps --no-compile --no-cache-dir --upgrade \
    --root-user-action=ignore --target "$site" "$wheels"/*.whl || exit
  if [ -f "$wheels/flashinfer_jit_cache.tgz" ]; then
    tar xzf "$wheels/flashinfer_jit_cache.tgz" -C "$site" || exit
  fi
  touch "$site/.installed"
fi
export PYTHONPATH="$site:$PWD${PYTHONPATH:+:$PYTHONPATH}"
export TANDEM_CACHE="${TANDEM_CACHE:-$site/tandem-cache}"
export TRITON_CACHE_DIR="${TRITON_CACHE_DIR:-$TANDEM_CACHE/gpu/triton}"  # as the engine has it
export FLASHINFER_WORKSPACE_BASE="${FLASHINFER_WORKSPACE_BASE:-$TANDEM_CACHE/gpu/flashinfer}"
mkdir -p "$TANDEM_CACHE"
if [ -f "$cache" ] && [ ! -e "$TANDEM_CACHE/.restored" ]; then
  tar xzf "$cache" -C "$TANDEM_CACHE" && touch "$TANDEM_CACHE/.restored"
fi

"$@"
code=$?

if [ -n "$out" ]; then
  tar czf "$out/cache.tgz" --exclude=./models --exclude=./bytecode --exclude=./.restored -C "$TANDEM_CACHE" .
fi
exit $code
