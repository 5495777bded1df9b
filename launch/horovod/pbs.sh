#!/usr/bin/env bash
# Train under PBS with a Horovod that was built with MPI: mpirun starts a worker for each GPU.
#
#   qsub job.sh             from the folder that OUT is relative to
#   DRY_RUN=1 bash job.sh   print the command only
#
# When LIMIT ends, ten minutes before the walltime, the run saves and exits with code 75, and qrerun
# requeues it; if that needs an operator's rights, submit it again: it resumes.
#PBS -N {{ name }}
{% if partition %}
#PBS -q {{ partition }}
{% endif %}
{% if account %}
#PBS -A {{ account }}
{% endif %}
{% if exclusive %}
#PBS -l place=scatter:excl
{% endif %}
#PBS -l select={{ nodes }}:ncpus={{ (cpus or 8) * gpus_per_node }}:ngpus={{ gpus_per_node }}:mpiprocs={{ gpus_per_node }}{{ ':mem=%dgb' | format(memory) if memory else '' }}
#PBS -l walltime={{ time }}
#PBS -r y
#PBS -j oe
set -euo pipefail
cd "${PBS_O_WORKDIR:-.}"
RECIPE={{ recipe | quote }}
OUT={{ out | quote }}
OPTIONS=({{ options | map('quote') | join(' ') }})
python=({{ python | map('quote') | join(' ') }})
LIMIT={{ time_limit }}
NODEFILE=${PBS_NODEFILE:-/dev/null}

(($#)) || set -- train "$RECIPE" --out "$OUT" --time-limit "$LIMIT" "${OPTIONS[@]}"
command=(mpirun -np "$(wc -l <"$NODEFILE")" --hostfile "$NODEFILE" --bind-to none --map-by slot)
for name in PATH LD_LIBRARY_PATH PYTHONPATH "${!NCCL_@}" "${!HOROVOD_@}" "${!WANDB_@}" \
    "${!MLFLOW_@}" "${!MLPERF_@}" "${!AWS_@}" "${!AZURE_@}" "${!GOOGLE_@}"; do
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
