#!/usr/bin/env bash
# Train on several hosts with torch.distributed: to be started on each of them.
#
#   FIRST=node1 NODE=0 bash job.sh                    on node1; NODE=1 on the next, ...
#   FIRST=node1 NODE=0 bash job.sh doctor --network   measure the network instead
#   DRY_RUN=1 FIRST=node1 NODE=0 bash job.sh          print the command only
#
# A single node needs neither FIRST nor NODE, and its workers listen only on the loopback interface;
# with several, FIRST listens on its PORT, on all interfaces. The same command resumes an interrupted
# run.
set -euo pipefail
RECIPE={{ recipe | quote }}
OUT={{ out | quote }}
OPTIONS=({{ options | map('quote') | join(' ') }})
python=({{ python | map('quote') | join(' ') }})
NODES={{ nodes }}
GPUS={{ gpus_per_node }}

(($#)) || set -- train "$RECIPE" --out "$OUT" "${OPTIONS[@]}"
command=("${python[@]}" -m)
if ((NODES == 1)); then
    command+=(largebatch "$@" --workers "$GPUS")
else
    command+=(torch.distributed.run --nnodes "$NODES" --nproc-per-node "$GPUS"
        --node-rank "${NODE:?number this host: NODE=0, 1, ...}"
        --master-addr "${FIRST:?name the host with NODE=0}" --master-port "${PORT:-29500}"
        -m largebatch "$@")
fi
echo "+$(printf ' %q' "${command[@]}")"
[[ ${DRY_RUN:-} == 1 ]] || exec "${command[@]}"
