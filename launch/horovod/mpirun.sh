#!/usr/bin/env bash
# Train on several hosts with a Horovod that was built with MPI, whose workers mpirun starts.
#
#   HOSTS=node1:{{ gpus_per_node }},node2:{{ gpus_per_node }} bash job.sh                    Open MPI
#   HOSTS=node1:{{ gpus_per_node }},node2:{{ gpus_per_node }} bash job.sh doctor --network   measure the network instead
#   DRY_RUN=1 HOSTS=... bash job.sh                      print the command only
#
# SIGUSR1 makes the run save and end with exit code 75; on SIGTERM mpirun kills it. The same command
# resumes an interrupted run.
set -euo pipefail
RECIPE={{ recipe | quote }}
OUT={{ out | quote }}
OPTIONS=({{ options | map('quote') | join(' ') }})
python=({{ python | map('quote') | join(' ') }})
WORKERS={{ workers }}
HOSTS=${HOSTS:?name the hosts and their slots, such as HOSTS=node1:{{ gpus_per_node }},node2:{{ gpus_per_node }}}

(($#)) || set -- train "$RECIPE" --out "$OUT" "${OPTIONS[@]}"
# Not bound to a core: a worker's threads decode images on all cores of its host.
command=(mpirun -np "$WORKERS" -H "$HOSTS" --bind-to none --map-by slot)
for name in PATH LD_LIBRARY_PATH PYTHONPATH OMP_NUM_THREADS "${!NCCL_@}" "${!HOROVOD_@}" "${!WANDB_@}" \
    "${!MLFLOW_@}" "${!MLPERF_@}" "${!AWS_@}" "${!AZURE_@}" "${!GOOGLE_@}"; do
    [[ ! -v $name ]] || command+=(-x "$name")
done
command+=("${python[@]}" -m largebatch "$@")
echo "+$(printf ' %q' "${command[@]}")"
[[ ${DRY_RUN:-} == 1 ]] || exec "${command[@]}"
