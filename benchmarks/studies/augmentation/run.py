"""Carry out the study of augmentation and polishing: `study.yaml`.

    python -m benchmarks.studies.augmentation.run [--jobs 2] [--seconds 3600] [--out DIR]

Needs LARGEBATCH_DATA. The command stops after --seconds, with exit code 75; the same command
continues with the runs that have no record. tables.py then prints the results and writes them.
"""

from pathlib import Path

from benchmarks.studies.accuracies import arguments_of_runs, make_runs
from benchmarks.studies.images import write_part
from largebatch.lab.studies.study import load_study

FOLDER = Path(__file__).parent
TRAINED = 4_800
"""Number of training images, as in the study."""


def main() -> None:
    """Make the runs that have no record."""
    args = arguments_of_runs(__doc__, name="augmentation")
    data = write_part(args.out.parent, "cifar10", train=TRAINED)
    make_runs(load_study(FOLDER / "study.yaml"), FOLDER, {"": data}, args)


if __name__ == "__main__":
    main()
