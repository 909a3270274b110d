#!/bin/sh
# docker/release.sh [--dry-run] [NAME]: builds all images of the release in dist/ (`make release`), one for each file
# sdk-*.env, with DJL Serving and without, and those of the CPU. Tags: NAME:VERSION-IMAGE-sdkSDK; NAME is
# djl-python-neuronx unless given. --dry-run prints the commands alone.
set -eu
cd "$(dirname "$0")/.."
dry_run=
[ "${1:-}" != --dry-run ] || { dry_run=1 && shift; }
name=${1:-djl-python-neuronx}
fail() { echo "docker/release.sh: $*" >&2 && exit 1; }
for wheel in dist/*.whl; do
    [ -f "$wheel" ] || fail "no wheel in dist/; run make release"
done
version=${wheel#*-}
version=${version%%-*}
git tag --list --points-at HEAD | grep -qx "v$version" ||
    fail "the wheel in dist/ is of $version, and this commit has no tag v$version; check it out, run make release"
run() {
    echo "$@"
    [ -n "$dry_run" ] || "$@"
}
# DJL's image starts from the one of its backend, which its command builds first.
both() {
    run env SDK="${2#-sdk}" BACKEND="$1" docker/build.sh djl
    for image in "$1$2" "djl-$1$2"; do
        run docker tag "djl-python-neuronx:$image" "$name:$version-$image"
    done
}
both cpu ""
for pins in docker/sdk-*.env; do
    sdk=${pins#docker/sdk-}
    backend=$(grep -q ^TRANSFORMERS_NEURONX= "$pins" && echo tnx || echo nxdi)
    both "$backend" "-sdk${sdk%.env}"
done
