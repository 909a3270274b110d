#!/bin/sh
# What a container runs: `serve` for SageMaker and without arguments, another command of djl-neuronx (`check`,
# `compile MODEL --output s3://bucket/folder`), or any program. Flags alone, as the images of TGI and vLLM take them, are
# those of `serve`. exec: signals reach the server, which has process id 1.
set -eu
case ${1:-} in
-h | --help | --version) ;;
'' | -*) set -- serve "$@" ;;
esac

# DJL_NEURONX_CHECK=false starts without it. Flags of `serve` would be unknown to `check`.
checked_first() {
    [ "${DJL_NEURONX_CHECK:-true}" = true ] || return 1
    for argument; do
        case $argument in -*) return 1 ;; esac
    done
}

case $1 in
serve)
    shift
    if checked_first "$@"; then
        # Otherwise process 1 would ignore the signal, and serve.
        trap 'exit 143' TERM INT
        djl-neuronx check "$@" >&2 || exit 1
        trap - TERM INT
    fi
    exec djl-neuronx serve "$@"
    ;;
bench | check | compile | convert | doctor | options | plan | completion | verify | -*) exec djl-neuronx "$@" ;;
*) exec "$@" ;;
esac
