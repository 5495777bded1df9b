"""Carry out the study of orders in chunks and windows: `study.yaml`.

    python -m benchmarks.studies.order.run [--jobs 2] [--seconds 3600] [--out DIR]

Needs LARGEBATCH_DATA. The command stops after --seconds, with exit code 75; the same command
continues with the runs that have no record. tables.py then prints the results and writes them.
"""

from pathlib import Path

from benchmarks.studies.accuracies import arguments_of_runs, make_runs
from benchmarks.studies.images import write_part
from largebatch.data.datasets import import_data
from largebatch.lab.studies.study import load_study
from largebatch.storage import silent

FOLDER = Path(__file__).parent
TRAINED = 4_800
"""Number of training images, as in the study."""

SHARD_BYTES = 10**7


def write_shards(work: Path) -> dict[str, Path]:
    """Return folders with shards whose images are shuffled and sorted; create them if needed."""
    images = write_part(work, "cifar10", train=TRAINED)
    shards = {}
    for name, seed in (("shuffled", 0), ("sorted", None)):
        shards[name] = work / f"{images.name}-{name}"
        if not shards[name].exists():
            import_data(
                "webdataset",
                images,
                shards[name],
                shard_bytes=SHARD_BYTES,
                progress=silent,
                seed=seed,
            )
    return shards


def main() -> None:
    """Make the runs that have no record."""
    args = arguments_of_runs(__doc__, name="order")
    shards = write_shards(args.out.parent)
    study = load_study(FOLDER / "study.yaml")
    data = {name: shards[name.rpartition("-")[2]] for name in study.recipes}
    make_runs(study, FOLDER, data, args)


if __name__ == "__main__":
    main()
