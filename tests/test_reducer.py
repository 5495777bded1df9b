import itertools
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from largebatch.backends.reducer import Reducer, cubic_groups
from largebatch.backends.serial import Serial


class Recorder(Serial):
    """One worker that notes the size of every tensor it is asked to sum."""

    def __init__(self) -> None:
        super().__init__(torch.device("cpu"))
        self.sent: list[int] = []

    def all_reduce(self, tensor: Tensor) -> Any:  # noqa: ANN401 -- as Serial's
        self.sent.append(tensor.numel())
        return super().all_reduce(tensor)


def net() -> nn.Sequential:
    return nn.Sequential(*[nn.Linear(4, 4) for _ in range(3)])  # 6 tensors: groups of 3 and 3


@pytest.mark.parametrize("num_tensors", [0, 1, 3, 4, 24, 25, 81, 161, 500])
def test_every_tensor_is_in_one_group_and_the_last_layer_goes_first(num_tensors: int) -> None:
    groups = cubic_groups(num_tensors)
    order = [number for group in groups for number in reversed(group)]
    assert order == list(reversed(range(num_tensors)))
    full = [3 * (k + 1) ** 3 - 3 * k**3 for k in range(len(groups))]
    assert all(
        len(group) == size
        for group, size in itertools.islice(zip(groups, full, strict=True), max(0, len(groups) - 1))
    )


def test_nothing_is_sent_before_the_last_micro_batch_and_then_while_backward_runs() -> None:
    model, backend = net(), Recorder()
    with Reducer(model.named_parameters(), backend) as reducer:
        reducer.zero()
        model(torch.ones(2, 4)).sum().backward()
        assert backend.sent == []
        sent_at_first_layer: list[int] = []
        hook = model[0].register_full_backward_pre_hook(
            lambda *_: sent_at_first_layer.extend(backend.sent)
        )
        reducer.arm()
        model(torch.ones(2, 4, requires_grad=True)).sum().backward()
        hook.remove()
        assert sent_at_first_layer == [24]  # the last layer, and the bias before it
        assert backend.sent == [24, 36]
        reducer.wait()


def test_gradients_accumulate_and_are_zeroed_in_place() -> None:
    model = net()
    with Reducer(model.named_parameters(), Recorder()) as reducer:
        addresses = [
            weight.grad.data_ptr() for weight in model.parameters() if weight.grad is not None
        ]
        for _ in range(2):
            reducer.zero()
            for micro in range(3):
                if micro == 2:
                    reducer.arm()
                model(torch.full((2, 4), 0.5)).sum().backward()
            reducer.wait()
        expected = net()
        expected.load_state_dict(model.state_dict())
        for _ in range(3):
            expected(torch.full((2, 4), 0.5)).sum().backward()
        for ours, theirs in zip(model.parameters(), expected.parameters(), strict=True):
            torch.testing.assert_close(ours.grad, theirs.grad)
        now = [weight.grad.data_ptr() for weight in model.parameters() if weight.grad is not None]
        assert now == addresses


def test_a_parameter_that_no_gradient_reaches_is_named() -> None:
    model = nn.ModuleDict({"used": nn.Linear(2, 2), "idle": nn.Linear(2, 2)})
    with Reducer(model.named_parameters(), Recorder()) as reducer:
        reducer.arm()
        model["used"](torch.ones(1, 2)).sum().backward()
        with pytest.raises(
            ValueError, match="no gradient reached idle.bias, idle.weight; set requires_grad=False"
        ):
            reducer.wait()


def test_frozen_parameters_are_left_out_and_shared_ones_count_once() -> None:
    model, backend = net(), Recorder()
    model[1].weight = model[0].weight
    model[2].requires_grad_(requires_grad=False)
    with Reducer(model.named_parameters(), backend) as reducer:
        reducer.arm()
        model(torch.ones(2, 4)).sum().backward()
        reducer.wait()
        assert sum(backend.sent) == 16 + 4 + 4
        assert model[2].weight.grad is None


def test_gradients_that_left_the_buffer_are_noticed() -> None:
    model = net()
    with Reducer(model.named_parameters(), Recorder()) as reducer:
        model.zero_grad(set_to_none=True)
        with pytest.raises(ValueError, match="1.bias.*use Reducer.zero"):
            reducer.arm()


def test_closing_leaves_the_model_as_it_was() -> None:
    model, backend = net(), Recorder()
    reducer = Reducer(model.named_parameters(), backend)
    reducer.close()
    assert all(weight.grad is None for weight in model.parameters())
    model(torch.ones(2, 4)).sum().backward()
    assert backend.sent == []


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (nn.Linear(2, 2).requires_grad_(requires_grad=False), "no parameter with requires_grad"),
        (nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2).double()), "different types or devices"),
    ],
)
def test_a_model_that_cannot_be_reduced_is_refused(model: nn.Module, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Reducer(model.named_parameters(), Recorder())
