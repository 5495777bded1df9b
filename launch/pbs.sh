#!/usr/bin/env bash
# Train under PBS with a Horovod that was built with MPI: mpirun starts a worker for each GPU.
#
#   qsub launch/pbs.sh             from the folder that OUT is relative to
#   DRY_RUN=1 bash launch/pbs.sh   print the command only
#
# When LIMIT ends, ten minutes before the walltime, the run saves and exits with code 75, and qrerun
# requeues it; if that needs an operator's rights, submit it again: it resumes.
#PBS -N largebatch
#PBS -l select=2:ncpus=64:ngpus=8:mpiprocs=8
#PBS -l walltime=08:00:00
#PBS -r y
#PBS -j oe
set -euo pipefail
cd "${PBS_O_WORKDIR:-.}"
RECIPE=${RECIPE:-digits_96}
OUT=${OUT:-runs/digits_96}
OPTIONS=(--resume auto)
python=(python3)
[[ ! ${PYTHON:-} ]] || read -ra python <<<"$PYTHON" # apptainer exec --nv largebatch.sif python3
LIMIT=${LIMIT:-470m}
NODEFILE=${PBS_NODEFILE:-/dev/null}

(($#)) || set -- train "$RECIPE" --out "$OUT" --time-limit "$LIMIT" "${OPTIONS[@]}"
command=(mpirun -np "$(wc -l <"$NODEFILE")" --hostfile "$NODEFILE" --bind-to none --map-by slot)
for name in PATH LD_LIBRARY_PATH PYTHONPATH "${!NCCL_@}" "${!HOROVOD_@}" "${!WANDB_@}" \
    "${!MLFLOW_@}" "${!MLPERF_@}"; do
    [[ ! -v $name ]] || command+=(-x "$name")
done
command+=("${python[@]}" -m largebatch "$@")
echo "+$(printf ' %q' "${command[@]}")"
[[ ${DRY_RUN:-} != 1 ]] || exit 0
"${command[@]}" &
run=$! stopped='' code=0
trap 'stopped=1; kill -USR1 "$run" || true' TERM # which mpirun passes on, unlike SIGTERM
wait "$run" || code=$?
[[ ! $stopped ]] || { code=0 && wait "$run"; } || code=$? # the signal ended the wait before
if ((code == 75)); then qrerun "$PBS_JOBID"; fi
exit "$code"
