"""The recipe: one YAML file that describes a training run completely.

Every section is frozen and strict; an unknown key is an error. What decides the result has no
default, except where the literature agrees on one.
"""

import hashlib
import json
from typing import Self

from pydantic import ValidationError, model_validator
from pydantic_core import InitErrorDetails

from largebatch.address import Place
from largebatch.errors import DataError, RecipeError
from largebatch.formatting import Tabular, dotted
from largebatch.recipe.execution import Execution
from largebatch.recipe.keys import Keys, Reduction, Tracking
from largebatch.recipe.validation import find_conflicts


class Recipe(Tabular, Keys):
    """One training run, complete: the file is the experiment.

    Prints as a table of the keys that do not have their defaults.
    """

    @model_validator(mode="after")
    def _sections_fit_each_other(self) -> Self:
        conflicts = list(find_conflicts(self))
        if conflicts:
            raise ValidationError.from_exception_data(
                type(self).__name__,
                [
                    InitErrorDetails(
                        type="value_error", input=self.name, ctx={"error": ValueError(conflict)}
                    )
                    for conflict in conflicts
                ],
            )
        return self

    def _caption(self) -> str:
        return f"recipe {self.name}"

    def _rows(self) -> list[list[str]]:
        values = self.model_dump(mode="json", exclude_defaults=True)
        texts = [
            [key, value if isinstance(value, str) else json.dumps(value)]
            for key, value in dotted(values)
        ]
        return [["key", "value"], *texts]

    @property
    def mathematics(self) -> Self:
        """The recipe without execution, trackers and monitors, which a resumed run may change."""
        return self.model_copy(
            update={"execution": Execution(), "tracking": Tracking(), "monitor": ()}
        )

    @property
    def group(self) -> str:
        """Name under which trackers group the run with others that differ only in their seed."""
        same = self.mathematics.model_dump_json(exclude={"seed"})
        digest = hashlib.sha256(same.encode()).hexdigest()
        return self.tracking.group or f"{self.name}-{digest[:6]}"

    def with_execution(self, **changes: object) -> Self:
        """Return the recipe with other settings of `execution`, such as device_batch=64.

        Raises pydantic.ValidationError, a ValueError, for what that section does not allow.
        """
        changed = self.model_dump() | {"execution": {**self.execution.model_dump(), **changes}}
        return self.model_validate(changed)

    @property
    def without_machine_settings(self) -> Self:
        """The recipe for evaluation or polishing, on a machine that may lack its kernels."""
        kernels = "torch" if self.execution.kernels == "torch" else "auto"
        return self.with_execution(kernels=kernels).model_copy(
            update={"reduction": Reduction(), "protocol": None}
        )

    @property
    def sums_gradients(self) -> bool:
        """True if every update sums the gradients of all workers; False with a protocol.

        Each worker then keeps its own gradients, and sends them to the servers.
        """
        return self.protocol is None

    def is_server(self, rank: int) -> bool:
        """Return True if a worker holds weights and trains nothing."""
        return self.protocol is not None and rank >= self.protocol.learners

    def refuse_folder(self, folder: Place | None) -> None:
        """Raise DataError if a folder of images is given that would not be read."""
        if folder is not None and self.data.source != "folder":
            raise DataError(f"--data {folder} would not be read: data.source is {self.data.source}")

    def require_backend(
        self, name: str, *, use: str = "--workers N, torchrun or srun, and --backend torch"
    ) -> None:
        """Raise RecipeError, with what to `use`, if the backend of this name cannot train it."""
        if name == "horovod" and self.protocol is not None and self.protocol.workers > 1:
            raise RecipeError(
                f"protocol: Horovod cannot send to one worker alone; use {use}, or leave it out"
            )
        if name == "horovod" and self.reduction.dtype == "bf16":
            raise RecipeError(
                f"reduction.dtype: bf16: Horovod has no such type; use {use}, or another dtype"
            )
