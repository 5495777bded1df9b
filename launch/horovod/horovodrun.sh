#!/usr/bin/env bash
# Train on several hosts with Horovod, whose workers horovodrun starts over ssh.
#
#   HOSTS=node1:{{ gpus_per_node }},node2:{{ gpus_per_node }} bash job.sh                    Gloo connects the workers
#   HOSTS=node1:{{ gpus_per_node }},node2:{{ gpus_per_node }} CONTROLLER=mpi bash job.sh     MPI, where Horovod has it
#   HOSTS=node1:{{ gpus_per_node }},node2:{{ gpus_per_node }} bash job.sh doctor --network   measure the network instead
#   DRY_RUN=1 HOSTS=... bash job.sh                      print the command only
#
# The hosts need the same files at the same paths and ssh without a password. The same command
# resumes an interrupted run.
set -euo pipefail
RECIPE={{ recipe | quote }}
OUT={{ out | quote }}
OPTIONS=({{ options | map('quote') | join(' ') }})
python=({{ python | map('quote') | join(' ') }})
found=$(type -P "${python[0]}") && PATH=${found%/*}:$PATH # with its horovodrun
WORKERS={{ workers }}
HOSTS=${HOSTS:?name the hosts and their slots, such as HOSTS=node1:{{ gpus_per_node }},node2:{{ gpus_per_node }}}

(($#)) || set -- train "$RECIPE" --out "$OUT" "${OPTIONS[@]}"
command=(horovodrun "--${CONTROLLER:-gloo}" -np "$WORKERS" -H "$HOSTS"
    "${python[@]}" -m largebatch "$@")
echo "+$(printf ' %q' "${command[@]}")"
[[ ${DRY_RUN:-} != 1 ]] || exit 0
type -P horovodrun >/dev/null ||
    { echo "no horovodrun on this host (an image's is not used): install Horovod here, or use launch torchrun" >&2; exit 127; }
exec "${command[@]}"
