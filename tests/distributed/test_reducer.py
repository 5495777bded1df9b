import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from largebatch.distributed.reducer import Grouping, Reducer, by_bytes, cubic
from largebatch.distributed.serial import Serial
from largebatch.errors import UnusedParametersError


class Recorder(Serial):
    """One of two workers, the other with zeros; it records the size of every sum."""

    world_size = 2

    def __init__(self) -> None:
        super().__init__(torch.device("cpu"))
        self.sent: list[int] = []

    def all_reduce(self, tensor: Tensor) -> Any:  # noqa: ANN401 -- as Serial's
        self.sent.append(tensor.numel())
        return super().all_reduce(tensor)


one_or_two = pytest.mark.parametrize(
    "workers",
    [pytest.param(lambda: Serial(torch.device("cpu")), id="1"), pytest.param(Recorder, id="2")],
)


def net() -> nn.Sequential:
    return nn.Sequential(*[nn.Linear(4, 4) for _ in range(3)])  # 6 tensors: groups of 3 and 3


@pytest.mark.parametrize("num_tensors", [0, 1, 3, 4, 24, 25, 81, 161, 500])
@pytest.mark.parametrize(
    ("grouping", "full"),
    [
        pytest.param(cubic, [3, 21, 57, 111, 183, 273], id="cubic"),
        pytest.param(by_bytes(12), [3] * 200, id="bytes"),
    ],
)
def test_every_tensor_is_in_one_group_and_the_last_layer_goes_first(
    grouping: Grouping, full: list[int], num_tensors: int
) -> None:
    groups = grouping([4] * num_tensors)
    order = [number for group in groups for number in reversed(group)]
    assert order == list(reversed(range(num_tensors)))
    lengths = [len(group) for group in groups]
    assert lengths[:-1] == full[: len(lengths)][:-1]
    assert all(0 < length <= limit for length, limit in zip(lengths, full, strict=False))


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


def test_gradients_accumulate_in_one_place_and_start_from_zero() -> None:
    model = net()
    addresses = set()
    with Reducer(model.named_parameters(), Recorder()) as reducer:
        for _ in range(2):
            reducer.zero()
            for micro in range(3):
                if micro == 2:
                    reducer.arm()
                model(torch.full((2, 4), 0.5)).sum().backward()
            reducer.wait()
            addresses.add(
                tuple(w.grad.data_ptr() for w in model.parameters() if w.grad is not None)
            )
        expected = net()
        expected.load_state_dict(model.state_dict())
        for _ in range(3):
            expected(torch.full((2, 4), 0.5)).sum().backward()
        for ours, theirs in zip(model.parameters(), expected.parameters(), strict=True):
            torch.testing.assert_close(ours.grad, theirs.grad)
        assert len(addresses) == 1


def zero_grad(model: nn.Module) -> None:
    model.zero_grad()


def replace_gradients(model: nn.Module) -> None:
    for weight in model.parameters():
        weight.grad = torch.ones_like(weight)


def update(model: nn.Module, reducer: Reducer) -> list[Tensor | None]:
    reducer.zero()
    reducer.arm()
    model(torch.ones(2, 4)).sum().backward()
    reducer.wait()
    return [weight.grad for weight in model.parameters()]


@one_or_two
@pytest.mark.parametrize("change", [zero_grad, replace_gradients])
def test_gradients_may_be_replaced_between_steps_but_not_within_one(
    workers: Callable[[], Serial], change: Callable[[nn.Module], None]
) -> None:
    model = net()
    with Reducer(model.named_parameters(), workers()) as reducer:
        first = [weight.clone() for weight in update(model, reducer) if weight is not None]
        change(model)
        torch.testing.assert_close(update(model, reducer), first, rtol=0, atol=0)
        reducer.zero()
        model(torch.ones(2, 4)).sum().backward()
        change(model)
        with pytest.raises(ValueError, match=r"gradient of [0-2]\.(weight|bias)"):
            reducer.arm()


@one_or_two
@pytest.mark.parametrize("change", [zero_grad, replace_gradients])
def test_gradients_may_not_be_replaced_after_the_last_pass_either(
    workers: Callable[[], Serial], change: Callable[[nn.Module], None]
) -> None:
    model = net()
    with Reducer(model.named_parameters(), workers()) as reducer:
        reducer.zero()
        reducer.arm()
        model(torch.ones(2, 4)).sum().backward()
        change(model)
        with pytest.raises(ValueError, match=r"gradient of [0-2]\.(weight|bias)"):
            reducer.wait()


def halve(weight: Tensor) -> None:
    assert weight.grad is not None
    weight.grad = weight.grad / 2


@one_or_two
@pytest.mark.parametrize("layer", [0, 2])
def test_a_hook_may_not_replace_a_gradient(workers: Callable[[], Serial], layer: int) -> None:
    """Several workers would send the gradient that it has replaced, and one worker would not."""
    model = net()
    with Reducer(model.named_parameters(), workers()) as reducer:
        model.get_parameter(f"{layer}.weight").register_post_accumulate_grad_hook(halve)
        with pytest.raises(ValueError, match=rf"gradient of {layer}\.weight"):
            update(model, reducer)


def test_gradients_are_those_of_the_buffers_again_before_a_replay() -> None:
    model = net()
    with Reducer(model.named_parameters(), Recorder()) as reducer:
        before = update(model, reducer)
        model.zero_grad()
        reducer.refresh()
        after = [weight.grad for weight in model.parameters()]
        assert all(one is other for one, other in zip(before, after, strict=True))


def test_every_gradient_begins_at_a_multiple_of_16_bytes() -> None:
    """Kernels then load several elements at once; the gaps are zeros."""
    layers = [nn.Linear(3, 5), nn.Linear(5, 7).to(torch.bfloat16), nn.Linear(7, 4)]
    model = nn.ModuleList(layers)
    workers = Serial(torch.device("cpu"))
    with Reducer(model.named_parameters(), workers, dtype=torch.float16) as reducer:
        reducer.zero()
        reducer.arm()
        sum((weight.float().sum() for weight in model.parameters()), torch.zeros(())).backward()
        reducer.wait()
        for weight in model.parameters():
            assert weight.grad is not None
            assert weight.grad.data_ptr() % 16 == 0
            assert weight.grad.dtype == weight.dtype
        assert reducer.finite()


def test_a_parameter_may_be_reached_by_the_last_micro_batch_only() -> None:
    model = net()
    with Reducer(model.named_parameters(), Recorder()) as reducer:
        reducer.zero()
        model[:2](torch.ones(2, 4)).sum().backward()
        reducer.arm()
        model(torch.ones(2, 4)).sum().backward()
        reducer.wait()
        expected = net()
        expected.load_state_dict(model.state_dict())
        expected[:2](torch.ones(2, 4)).sum().backward()
        expected(torch.ones(2, 4)).sum().backward()
        for ours, theirs in zip(model.parameters(), expected.parameters(), strict=True):
            torch.testing.assert_close(ours.grad, theirs.grad)


class Alike(Recorder):
    """One of several workers with equal values; it sums in the given type."""

    def __init__(self, world_size: int) -> None:
        super().__init__()
        self.world_size = world_size
        self.dtypes: list[torch.dtype] = []

    def all_reduce(self, tensor: Tensor) -> Any:  # noqa: ANN401 -- as Serial's
        self.dtypes.append(tensor.dtype)
        held = tensor.clone()
        for _ in range(self.world_size - 1):
            tensor += held
        return super().all_reduce(tensor)


class AlikeExactly(Alike):
    """The same with one rounding, so that only the sent values can be wrong."""

    def all_reduce(self, tensor: Tensor) -> Any:  # noqa: ANN401 -- as Serial's
        tensor.copy_(tensor.double() * self.world_size)
        return Recorder.all_reduce(self, tensor)


def with_norms() -> nn.Sequential:
    """Two tensors of each kind of layer, in turn."""
    layers = [nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4), nn.BatchNorm1d(4)]
    return nn.Sequential(*layers, nn.Linear(4, 4))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("world_size", [1, 4])
def test_compressed_sums_do_not_overflow_and_norms_stay_exact(
    dtype: torch.dtype, world_size: int
) -> None:
    """The largest number of fp16 is 65,504, and 40,001 is none in either type."""
    model, workers = with_norms(), Alike(world_size)
    norms = [weight for layer in (model[1], model[3]) for weight in layer.parameters()]
    with Reducer(model.named_parameters(), workers, dtype=dtype, exact=norms) as reducer:
        reducer.zero()
        reducer.arm()
        sum(((weight * 40_001).sum() for weight in model.parameters()), torch.zeros(())).backward()
        reducer.wait()
        assert workers.dtypes == [dtype, dtype, torch.float32]
        assert workers.sent == [16 + 4 + 4, 16 + 16 + 4, 16]
        for weight in model.parameters():
            assert weight.grad is not None
            assert weight.grad.dtype == torch.float32
            error = (weight.grad / (world_size * 40_001) - 1).abs().max().item()
            if any(weight is norm for norm in norms):
                assert error == 0
            else:
                assert 0 < error <= torch.finfo(dtype).eps / 2


@pytest.mark.parametrize("world_size", [1, 64, 2048])
def test_small_gradients_of_a_divided_loss_survive_fp16_on_any_number_of_workers(
    world_size: int,
) -> None:
    """A mean of 1e-4 at the loss scale of 2,048 workers; divided twice it would be rounded off."""
    mean, scale = 1e-4, 2.0**16
    weight = nn.Parameter(torch.zeros(8))
    workers = AlikeExactly(world_size)
    with Reducer([("w", weight)], workers, dtype=torch.float16, divisor=1.0) as reducer:
        reducer.arm()
        (weight * (mean * scale / world_size)).sum().backward()
        reducer.wait()
        assert weight.grad is not None
        torch.testing.assert_close(weight.grad, torch.full((8,), mean * scale), rtol=5e-3, atol=0)


def test_the_step_after_a_failed_one_is_summed() -> None:
    model, workers = net(), Alike(2)
    with Reducer(model.named_parameters(), workers) as reducer:
        reducer.arm()
        model[2](torch.ones(1, 4)).sum().backward()
        with pytest.raises(UnusedParametersError, match="no gradient reached"):
            reducer.wait()
        reducer.zero()
        reducer.arm()
        model(torch.ones(1, 4)).sum().backward()
        reducer.wait()
        gradient = model.get_parameter("2.bias").grad
        assert gradient is not None
        assert gradient.tolist() == [2.0] * 4


class PassFailedError(Exception):
    """Raised by a hook in a backward pass."""


def fail(_: Tensor) -> None:
    raise PassFailedError


@one_or_two
def test_an_error_in_the_last_pass_leaves_nothing_to_the_next_step(
    workers: Callable[[], Serial],
) -> None:
    model = net()
    # Sent in a type of its own by one worker too, so that sums are under way on any number.
    with Reducer(model.named_parameters(), workers(), dtype=torch.float32) as reducer:
        reducer.zero()
        reducer.arm()
        hook = model.get_parameter("0.weight").register_hook(fail)
        with pytest.raises(PassFailedError):
            model(torch.ones(1, 4)).sum().backward()
        hook.remove()
        reducer.zero()
        model(torch.ones(1, 4)).sum().backward()
        reducer.arm()
        model(torch.ones(1, 4)).sum().backward()
        reducer.wait()
        gradient = model.get_parameter("2.bias").grad
        assert gradient is not None
        assert gradient.tolist() == [2.0] * 4


@one_or_two
def test_squares_of_half_gradients_are_finite(workers: Callable[[], Serial]) -> None:
    weight = nn.Parameter(torch.ones(4, dtype=torch.float16))
    with Reducer([("weight", weight)], workers(), measure=True) as reducer:
        reducer.zero()
        reducer.arm()
        (weight * 1000).sum().backward()
        reducer.wait()
        assert reducer.squares is not None
        assert reducer.squares.tolist() == [4e6, 4e6]


def test_a_second_backward_after_arm_is_refused() -> None:
    model = net()
    with Reducer(model.named_parameters(), Alike(2)) as reducer:
        reducer.arm()
        model(torch.ones(1, 4)).sum().backward()
        with pytest.raises(ValueError, match="2.bias"):
            model[2](torch.ones(1, 4)).sum().backward()


@one_or_two
def test_a_parameter_without_a_gradient_is_named(workers: Callable[[], Serial]) -> None:
    model = nn.ModuleDict({"used": nn.Linear(2, 2), "idle": nn.Linear(2, 2)})
    with Reducer(model.named_parameters(), workers()) as reducer:
        reducer.arm()
        model["used"](torch.ones(1, 2)).sum().backward()
        with pytest.raises(UnusedParametersError, match=r"idle\.bias, idle\.weight"):
            reducer.wait()


@one_or_two
@pytest.mark.parametrize(
    ("element", "finite"), [(1e30, True), (math.nan, False), (math.inf, False), (-math.inf, False)]
)
def test_one_element_decides_whether_gradients_are_finite(
    workers: Callable[[], Serial], element: float, *, finite: bool
) -> None:
    """The square of 1e30 is infinite in float32; a tensor without elements decides nothing."""
    weight, empty = nn.Parameter(torch.ones(1000)), nn.Parameter(torch.ones(0))
    with Reducer([("empty", empty), ("weight", weight)], workers()) as reducer:
        reducer.arm()
        factors = torch.ones(1000).index_fill(0, torch.tensor([500]), element)
        (torch.dot(weight, factors) + empty.sum()).backward()
        reducer.wait()
        assert bool(reducer.finite()) is finite


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


@one_or_two
def test_a_weight_that_was_frozen_is_not_trained_without_a_new_reducer(
    workers: Callable[[], Serial],
) -> None:
    model = net()
    model[0].requires_grad_(requires_grad=False)
    with Reducer(model.named_parameters(), workers()) as reducer:
        update(model, reducer)
        model[0].requires_grad_(requires_grad=True)
        with pytest.raises(ValueError, match=r"0\.weight"):
            update(model, reducer)


def test_closing_restores_the_model() -> None:
    model, backend = net(), Recorder()
    reducer = Reducer(model.named_parameters(), backend)
    reducer.close()
    assert all(weight.grad is None for weight in model.parameters())
    model(torch.ones(2, 4)).sum().backward()
    assert backend.sent == []


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (nn.Linear(2, 2).requires_grad_(requires_grad=False), "requires_grad"),
        (nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2).double()), "types or devices"),
    ],
)
def test_a_model_that_cannot_be_reduced_is_refused(model: nn.Module, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Reducer(model.named_parameters(), Recorder())


@one_or_two
@pytest.mark.parametrize(
    ("names", "message"),
    [
        pytest.param("ww", " w[: ]", id="one name"),
        pytest.param("vw", "v and w", id="two names"),
        pytest.param("vv", " v[: ]", id="twice"),
    ],
)
def test_names_of_parameters_are_unique(
    workers: Callable[[], Serial], names: str, message: str
) -> None:
    """One of the two would never be summed."""
    first, second = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
    weights = [first, second if names == "ww" else first]
    with pytest.raises(ValueError, match=message):
        Reducer(zip(names, weights, strict=True), workers())
    assert not first._post_accumulate_grad_hooks


@one_or_two
@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.filterwarnings("ignore:Using backward\\(\\) with create_graph=True")
def test_gradients_with_a_graph_are_refused_on_any_number_of_workers(
    workers: Callable[[], Serial], accumulation: int
) -> None:
    model = net()
    with Reducer(model.named_parameters(), workers()) as reducer:
        reducer.zero()
        if accumulation == 1:
            reducer.arm()
        with pytest.raises(ValueError, match=r"2\.bias.*create_graph=True.*torch\.autograd\.grad"):
            model(torch.ones(2, 4)).sum().backward(create_graph=True)


@one_or_two
@pytest.mark.parametrize("reentrant", [True, False])
def test_activations_may_be_recomputed_in_backward(
    workers: Callable[[], Serial], reentrant: bool
) -> None:
    model, images = net(), torch.ones(2, 4, requires_grad=True)
    with Reducer(model.named_parameters(), workers()) as reducer:
        reducer.zero()
        reducer.arm()
        hidden = checkpoint(model[:2], images, use_reentrant=reentrant)
        assert isinstance(hidden, Tensor)
        model[2](hidden).sum().backward()
        reducer.wait()
        assert all(weight.grad is not None for weight in model.parameters())
