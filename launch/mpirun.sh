#!/usr/bin/env bash
# Train on several hosts with a Horovod that was built with MPI, whose workers mpirun starts.
#
#   HOSTS=node1:8,node2:8 bash launch/mpirun.sh                    Open MPI
#   HOSTS=node1:8,node2:8 bash launch/mpirun.sh doctor --network   measure the network instead
#   DRY_RUN=1 HOSTS=... bash launch/mpirun.sh                      print the command only
#
# SIGUSR1 makes the run save and end with exit code 75; on SIGTERM mpirun kills it. The same command
# resumes an interrupted run.
set -euo pipefail
RECIPE=${RECIPE:-digits_96}
OUT=${OUT:-runs/digits_96}
OPTIONS=(--resume auto)
python=(python3)
[[ ! ${PYTHON:-} ]] || read -ra python <<<"$PYTHON" # apptainer exec --nv largebatch.sif python3
WORKERS=${WORKERS:-16}
HOSTS=${HOSTS:?name the hosts and their slots, such as HOSTS=node1:8,node2:8}

(($#)) || set -- train "$RECIPE" --out "$OUT" "${OPTIONS[@]}"
# Not bound to a core: a worker's threads decode images on all cores of its host.
command=(mpirun -np "$WORKERS" -H "$HOSTS" --bind-to none --map-by slot)
for name in PATH LD_LIBRARY_PATH PYTHONPATH OMP_NUM_THREADS "${!NCCL_@}" "${!HOROVOD_@}" "${!WANDB_@}" \
    "${!MLFLOW_@}" "${!MLPERF_@}"; do
    [[ ! -v $name ]] || command+=(-x "$name")
done
command+=("${python[@]}" -m largebatch "$@")
echo "+$(printf ' %q' "${command[@]}")"
[[ ${DRY_RUN:-} == 1 ]] || exec "${command[@]}"
