#!/usr/bin/env bash
# Train on several hosts with Horovod, whose workers horovodrun starts over ssh.
#
#   HOSTS=node1:8,node2:8 bash launch/horovodrun.sh                    Gloo connects the workers
#   HOSTS=node1:8,node2:8 CONTROLLER=mpi bash launch/horovodrun.sh     MPI, where Horovod has it
#   HOSTS=node1:8,node2:8 bash launch/horovodrun.sh doctor --network   measure the network instead
#   DRY_RUN=1 HOSTS=... bash launch/horovodrun.sh                      print the command only
#
# The hosts need the same files at the same paths and ssh without a password. The same command
# resumes an interrupted run.
set -euo pipefail
RECIPE=${RECIPE:-digits_96}
OUT=${OUT:-runs/digits_96}
OPTIONS=(--resume auto)
python=(python3)
[[ ! ${PYTHON:-} ]] || read -ra python <<<"$PYTHON" # apptainer exec --nv largebatch.sif python3
found=$(type -P "${python[0]}") && PATH=${found%/*}:$PATH # with its horovodrun
WORKERS=${WORKERS:-16}
HOSTS=${HOSTS:?name the hosts and their slots, such as HOSTS=node1:8,node2:8}

(($#)) || set -- train "$RECIPE" --out "$OUT" "${OPTIONS[@]}"
command=(horovodrun "--${CONTROLLER:-gloo}" -np "$WORKERS" -H "$HOSTS"
    "${python[@]}" -m largebatch "$@")
echo "+$(printf ' %q' "${command[@]}")"
[[ ${DRY_RUN:-} != 1 ]] || exit 0
type -P horovodrun >/dev/null ||
    { echo "no horovodrun on this host (an image's is not used): install Horovod here, or use launch torchrun" >&2; exit 127; }
exec "${command[@]}"
