"""The state of a protocol in a checkpoint: momentum, counts, and lost learners."""

from dataclasses import asdict, dataclass, field
from typing import Any

from pydantic import TypeAdapter
from torch import Tensor
from torch.optim import Optimizer

NAME = "protocol"
"""Name of this state in checkpoints and in summary.json."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LostLearner:
    """A learner that failed and without which the run continues."""

    learner: int
    update: int
    """Number of updates made until then, by the server that noted the loss."""

    mini_batch: int | None
    """Number of its last mini-batch, which was handed out again. None if it had none, and from all
    servers but the first."""

    silent: bool
    """True if it did nothing for the whole of --timeout; else its process was gone."""


_GRADIENTS = TypeAdapter(list[int])
_LOST = TypeAdapter(list[LostLearner])


@dataclass(slots=True)
class ProtocolState:
    """The state of a protocol, an ExtraState of the run."""

    momentum: dict[str, Tensor] = field(default_factory=dict)
    """Momentum with local steps, of the servers (`outer`) and of every learner (`inner`, a row
    each); this worker's optimizer has only its own. Empty without local steps."""

    gradients: list[int] = field(default_factory=list)
    """Number of gradients that the first server received, by learner."""

    lost: list[LostLearner] = field(default_factory=list)
    """Learners lost in all parts of the run; a resumed part begins with all learners."""

    def state_dict(self) -> dict[str, Any]:
        """Return tensors and plain values, for a checkpoint."""
        return {"momentum": self.momentum, **self.summary()}

    def load_state_dict(self, state: dict[str, Any], optimizer: Optimizer) -> None:
        """Load what `state_dict` returned; raise ValueError if it is of other weights."""
        self.momentum = state.get("momentum", {})
        self.gradients = _GRADIENTS.validate_python(state.get("gradients", []))
        self.lost = _LOST.validate_python(state.get("lost", []))
        weights = [weight for group in optimizer.param_groups for weight in group["params"]]
        num_weights = sum(weight.numel() for weight in weights)
        for name in ("outer", "inner") if self.momentum else ():
            saved = self.momentum[name].shape[-1]
            if saved != num_weights:
                raise ValueError(f"protocol: {name} is of {saved} weights")

    def drop_momentum(self) -> None:
        """Forget the momentum of local steps."""
        self.momentum = {}

    def summary(self) -> dict[str, Any]:
        """Return plain values for summary.json."""
        return {"gradients": list(self.gradients), "lost": [asdict(one) for one in self.lost]}

    def remarks(self) -> list[str]:
        """Return a remark on each learner that was lost."""
        return [f"learner {one.learner} was lost after {one.update} updates" for one in self.lost]
