#!/bin/sh
# docker/build.sh cpu|tnx|nxdi|djl [arguments of docker build]: builds djl-python-neuronx:IMAGE with the versions of
# versions.env and the wheel in dist/ (`make dist`). djl starts from the image of BACKEND (nxdi unless it is set) and is
# djl-python-neuronx:djl-BACKEND.
set -eu
cd "$(dirname "$0")/.."
image=${1:?expected cpu, tnx, nxdi or djl}
shift
tag=$image
if [ "$image" = djl ]; then
    backend=${BACKEND:-nxdi}
    docker/build.sh "$backend" "$@"
    set -- --build-arg "BACKEND=$backend" "$@"
    tag=djl-$backend
fi
for wheel in dist/*.whl; do
    [ -f "$wheel" ] || { echo "docker/build.sh: no wheel in dist/; run make dist" >&2 && exit 1; }
done
version=${wheel#*-}
set -- --build-arg "PACKAGE_VERSION=${version%%-*}" --build-arg "REVISION=$(git rev-parse HEAD)" "$@"
while IFS= read -r pin; do
    if grep -q "^ARG ${pin%%=*}$" "docker/Dockerfile.$image"; then set -- --build-arg "$pin" "$@"; fi
done <docker/versions.env
exec docker build --file "docker/Dockerfile.$image" --tag "djl-python-neuronx:$tag" "$@" .
