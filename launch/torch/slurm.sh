#!/usr/bin/env bash
# Train under SLURM: srun starts a worker for each GPU; torch.distributed connects them.
#
#   sbatch --nodes=4 job.sh          overrides the options below
#   sbatch job.sh doctor --network   measure the network instead
#   DRY_RUN=1 bash job.sh            print the command only
#
# Two minutes before the time limit the run saves, exits with code 75 and is requeued; it resumes in
# its next allocation.
#SBATCH --job-name={{ name }}
{% if partition %}
#SBATCH --partition={{ partition }}
{% endif %}
{% if account %}
#SBATCH --account={{ account }}
{% endif %}
{% if memory %}
#SBATCH --mem={{ memory }}G
{% elif exclusive %}
#SBATCH --mem=0
{% endif %}
{% if exclusive %}
#SBATCH --exclusive
{% endif %}
#SBATCH --nodes={{ nodes }}
#SBATCH --gpus-per-node={{ gpus_per_node }}
#SBATCH --ntasks-per-node={{ gpus_per_node }}
#SBATCH --cpus-per-task={{ cpus or 8 }}
#SBATCH --time={{ time }}
#SBATCH --signal=B:TERM@120
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=%x-%j.txt
set -euo pipefail
RECIPE={{ recipe | quote }}
OUT={{ out | quote }}
OPTIONS=({{ options | map('quote') | join(' ') }})
python=({{ python | map('quote') | join(' ') }})
IMAGE={{ image | quote if image else '' }}
MOUNTS={{ (['$PWD:$PWD'] + mounts | map('quote') | list) | join(',') }}

(($#)) || set -- train "$RECIPE" --out "$OUT" "${OPTIONS[@]}"
# torch.distributed connects the workers, so srun does not set up MPI.
# The workers end each other when one fails, and worker 0 may be saving when the others have ended.
command=(srun --mpi=none --kill-on-bad-exit=0 --cpus-per-task "${SLURM_CPUS_PER_TASK:-8}")
[[ ! $IMAGE ]] || command+=(--container-image "$IMAGE" --container-mounts "$MOUNTS"
    --container-workdir "$PWD")
command+=("${python[@]}" -m largebatch "$@")
echo "+$(printf ' %q' "${command[@]}")"
[[ ${DRY_RUN:-} != 1 ]] || exit 0
"${command[@]}" &
step=$! stopped='' code=0
trap 'stopped=1; kill -USR1 "$step" || true' TERM # srun passes that on; SIGTERM would kill
wait "$step" || code=$?
[[ ! $stopped ]] || { code=0 && wait "$step"; } || code=$? # the signal ended the wait before
if ((code == 75)); then scontrol requeue "$SLURM_JOB_ID"; fi
exit "$code"
