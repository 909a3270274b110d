#!/bin/sh
# docker/build.sh cpu|tnx|nxdi|djl [arguments of docker build]: builds djl-python-neuronx:IMAGE with the versions of
# versions.env and the wheel in dist/ (`make dist`). SDK=2.28 takes those of sdk-2.28.env instead of the image's own SDK,
# and appends -sdk2.28 to the tag. djl starts from the image of BACKEND (nxdi unless it is set) and is
# djl-python-neuronx:djl-BACKEND.
set -eu
cd "$(dirname "$0")/.."
image=${1:?expected cpu, tnx, nxdi or djl}
shift
fail() { echo "docker/build.sh: $*" >&2 && exit 1; }
case $image:${BACKEND:=nxdi} in
cpu:* | tnx:* | nxdi:* | djl:cpu | djl:tnx | djl:nxdi) ;;
djl:*) fail "BACKEND=$BACKEND: expected cpu, tnx or nxdi" ;;
*) fail "$image is no image: expected cpu, tnx, nxdi or djl" ;;
esac
suffix=${SDK:+-sdk$SDK}
sdk=${SDK:-none}
tag=$image$suffix
if [ "$image" = djl ]; then
    docker/build.sh "$BACKEND" "$@"
    set -- --build-arg "BACKEND=$BACKEND$suffix" "$@"
    tag=djl-$BACKEND$suffix
fi
for wheel in dist/*.whl; do
    [ -f "$wheel" ] || fail "no wheel in dist/; run make dist"
done
version=${wheel#*-}
set -- --build-arg "PACKAGE_VERSION=${version%%-*}" --build-arg "REVISION=$(git rev-parse HEAD)" "$@"
# Without a user and a password that the address of a clone may have.
source=$(git config --get remote.origin.url | sed 's#://[^/]*@#://#')
set -- --build-arg "SOURCE=$source" "$@"
case $image in
cpu) [ "$sdk" = none ] || fail "SDK=$sdk: the image cpu has none" ;;
nxdi | tnx) sdk=${SDK:-$(sed -n "s/^${image}_SDK=//p" docker/versions.env)} ;;
esac
pins=docker/sdk-$sdk.env
no_pin() {
    other=$(grep -q ^TRANSFORMERS_NEURONX= "$pins" && echo tnx || echo nxdi)
    fail "SDK=$sdk: $pins has no $1, which the image $image needs; it is for the image $other"
}
[ "$sdk" = none ] || [ -f "$pins" ] || fail "SDK=$sdk: expected one of" docker/sdk-*.env
# shellcheck disable=SC2013  # names have no spaces
for name in $(sed -n 's/^ARG \([A-Z0-9_]*\)$/\1/p' "docker/Dockerfile.$image"); do
    pin=$(cat docker/versions.env "$pins" 2>/dev/null | grep "^$name=") || no_pin "$name"
    set -- --build-arg "$pin" "$@"
done
exec docker build --file "docker/Dockerfile.$image" --tag "djl-python-neuronx:$tag" "$@" .
