#!/bin/sh
# What the image with DJL Serving runs: `serve` starts DJL Serving, everything else is entrypoint.sh's.
set -eu
[ "${1:-serve}" = serve ] || exec entrypoint.sh "$@"
[ $# -eq 0 ] || shift

# DJL Serving does not read SageMaker's variables. Its management API can run code, so it is open to this container
# alone, but for SageMaker's multi-model endpoints, which call it. The ports are shared with the other containers of an
# endpoint that has several; each has a range (first-last) of its own.
address=http://0.0.0.0:${SAGEMAKER_BIND_TO_PORT:-8080}
export SERVING_INFERENCE_ADDRESS="${SERVING_INFERENCE_ADDRESS:-$address}"
if [ "${SAGEMAKER_MULTI_MODEL:-false}" = true ]; then
    management=$SERVING_INFERENCE_ADDRESS
else
    ports=${SAGEMAKER_SAFE_PORT_RANGE:-8081}
    management=http://127.0.0.1:${ports##*-}
fi
export SERVING_MANAGEMENT_ADDRESS="${SERVING_MANAGEMENT_ADDRESS:-$management}"

# Async mode is the default, but not where a file or variable names a rolling batch, which it excludes, or none
# (`disable`: one request at a time), and not for models that are unloaded: only plain mode survives that (docs/djl.md).
rolling='^[[:space:]]*option\.rolling_batch[[:space:]]*[=:][[:space:]]*'
store=$SERVING_MODEL_STORE
named=$(sed -n "s/$rolling//p" "$store/serving.properties" "$store"/*/serving.properties 2>/dev/null | tr -d '\r')
for mode in ${OPTION_ROLLING_BATCH:-} $named; do
    [ "$mode" = auto ] || chosen=true
done
[ -n "${chosen:-}" ] || [ "${SAGEMAKER_MULTI_MODEL:-false}" = true ] || export OPTION_ASYNC_MODE="${OPTION_ASYNC_MODE:-true}"

exec serving "$@"
