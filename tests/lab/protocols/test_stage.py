import torch
from torch import nn

from largebatch.data.types import Batch
from largebatch.distributed.reducer import Reducer
from largebatch.distributed.serial import Serial
from largebatch.lab.protocols.stage import Gradients
from largebatch.models.batchnorm import Spans


def test_a_gradient_stays_as_it_is_when_the_next_one_is_computed() -> None:
    """A server keeps it until an update takes it; the buffers of a reducer are written again."""
    model = nn.Linear(4, 2)
    alone = Serial(torch.device("cpu"))
    # In a shorter type, because without one a CPU has no buffers.
    with Reducer(model.named_parameters(), alone, dtype=torch.bfloat16) as reducer:
        gradients = Gradients(
            model=model,
            weights=list(model.parameters()),
            batch=lambda number: Batch(torch.full((3, 4), 1.0 + number), torch.tensor([0, 1, 1])),
            criterion=nn.CrossEntropyLoss(reduction="sum"),
            reducer=reducer,
            spans=Spans(model, alone),
            learners=1,
            seed=0,
        )
        first, _ = gradients.of(0)
        before = [gradient.clone() for gradient in first]
        second, _ = gradients.of(1)
        torch.testing.assert_close(first, before, rtol=0, atol=0)
        assert not torch.equal(first[0], second[0])
