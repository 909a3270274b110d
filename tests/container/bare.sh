#!/bin/sh
# Runs this environment's djl-neuronx ($PYTHON) like an image: $OPT_ML as /opt/ml, a read-only root, a /tmp of its own,
# and a user without rights. Needs root, and a mount namespace of its own.
set -eu
# Overlays, for which nothing on the machine has to exist or change: this environment may lie below /opt or /tmp.
scratch=$(dirname "$OPT_ML")/scratch
mkdir -p "$scratch"
mount -t tmpfs tmpfs "$scratch"
mkdir -p "$scratch/opt/ml" "$scratch/tmp" "$scratch/work"
chmod 1777 "$scratch/tmp"
mount -t overlay -o "lowerdir=$scratch/opt:/opt" overlay /opt
mount --rbind "$OPT_ML" /opt/ml
mount -t overlay -o "lowerdir=/tmp,upperdir=$scratch/tmp,workdir=$scratch/work" overlay /tmp
mount -o remount,bind,ro /
# The capability: an interpreter may lie in a folder of root. It reads everything and writes nothing.
exec setpriv --reuid=1000 --regid=1000 --clear-groups --no-new-privs --bounding-set=-all,+dac_read_search \
    --inh-caps=-all,+dac_read_search --ambient-caps=-all,+dac_read_search \
    "$PYTHON" -c 'import sys; from djl_python_neuronx.cli import main; sys.exit(main())' "$@"
