#!/bin/sh
# docker/replay.sh cpu|tnx|nxdi|djl DIR: runs the steps of an image's Dockerfile without Docker, in a plain Debian that
# debootstrap makes in DIR/root, and writes DIR/run, which runs the image: DIR/run [arguments of the entrypoint].
set -eu
exec "${PYTHON:-python3}" "$(dirname "$0")/replay.py" build "$@"
