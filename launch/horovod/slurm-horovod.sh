#!/usr/bin/env bash
# Train under SLURM with Horovod: horovodrun starts a worker for each GPU, over ssh.
#
#   sbatch --nodes=4 job.sh          overrides the options below
#   sbatch job.sh doctor --network   measure the network instead
#   DRY_RUN=1 bash job.sh            print the command only
# Two minutes before the time limit the run saves and is requeued; it then resumes.
#SBATCH --job-name={{ name }}
{% if partition %}
#SBATCH --partition={{ partition }}
{% endif %}
{% if account %}
#SBATCH --account={{ account }}
{% endif %}
{% if exclusive %}
#SBATCH --mem=0
#SBATCH --exclusive
{% endif %}
#SBATCH --nodes={{ nodes }}
#SBATCH --gpus-per-node={{ gpus_per_node }}
#SBATCH --exclusive
#SBATCH --mem=0
#SBATCH --time={{ time }}
#SBATCH --signal=B:TERM@120
#SBATCH --requeue
#SBATCH --open-mode=append
# shellcheck disable=SC2329 # functions that a trap calls
set -euo pipefail
RECIPE={{ recipe | quote }}
OUT={{ out | quote }}
OPTIONS=({{ options | map('quote') | join(' ') }})
python=({{ python | map('quote') | join(' ') }})
found=$(type -P "${python[0]}") && PATH=${found%/*}:$PATH # with its horovodrun
(($#)) || set -- train "$RECIPE" --out "$OUT" "${OPTIONS[@]}"
mapfile -t hosts < <(scontrol show hostnames)
slots=("${hosts[@]/%/:${SLURM_GPUS_ON_NODE:-8}}")
command=(horovodrun --gloo -np $(({% raw %}${#hosts[@]}{% endraw %} * ${SLURM_GPUS_ON_NODE:-8}))
    -H "$(IFS=, && echo "${slots[*]}")" "${python[@]}" -m largebatch "$@")
echo "+$(printf ' %q' "${command[@]}")"
[[ ${DRY_RUN:-} != 1 ]] || exit 0
type -P horovodrun >/dev/null ||
    { echo "no horovodrun on this host (an image's is not used): install Horovod here, or use launch slurm" >&2; exit 127; }
begun=$(mktemp) stopped='' code=0
"${command[@]}" & run=$!
# To its workers on this host, which tell the others: horovodrun would kill all of them after 5 s.
tree() { echo "$1" && pgrep -P "$1" | while read -r id; do tree "$id"; done; }
warn() { stopped=1 && pkill -P "$(tree "$run" | paste -sd,)" -f '^[^ ]*python[^ ]* -m largebatch '; }
trap 'warn || true' TERM # there may be no worker yet, or none any more
wait "$run" || code=$?
[[ ! $stopped ]] || { code=0 && wait "$run"; } || code=$?
# horovodrun makes a 1 of the workers' 75; what they wrote tells.
[[ $OUT/summary.json -nt $begun ]] && grep -q '"interrupted"' "$OUT/summary.json" &&
    scontrol requeue "$SLURM_JOB_ID"
exit "$code"
