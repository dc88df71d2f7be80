"""The fused engine: its loss, gradients, optimizer and kernels, against plain implementations."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional

from trajectory_transformer.config import ModelConfig, TokenConfig, TrainConfig
from trajectory_transformer.data.episode import Dataset
from trajectory_transformer.gpu.training.fused import FlatAdamW, fused_loss, why_not_fused_training
from trajectory_transformer.model.trajectory_model import TrajectoryModel
from trajectory_transformer.tokens.windows import gather_windows, tokenize
from trajectory_transformer.training.loss import weighted_loss
from trajectory_transformer.training.optim import GRAD_CLIP, make_optimizer

MODEL = ModelConfig(window=3, num_layers=2, num_heads=2, width=32, dropout=0.0)
MASK = 2**32 - 1


def with_maps(dataset: Dataset) -> Dataset:
    """The same episodes, each with its own map."""
    rng = np.random.default_rng(0)
    maps = [rng.integers(2, size=(2, 6, 6)).astype(np.uint8) for _ in dataset.episodes]
    pairs = zip(dataset.episodes, maps, strict=True)
    return replace(dataset, episodes=tuple(replace(episode, map=map) for episode, map in pairs))


def kept(seed: Tensor, num_rows: int, num_columns: int, dropout: float) -> Tensor:
    """The factors of dropout on a matrix: 0, or 1 / (1 - dropout)."""
    rows = ((torch.arange(num_rows, device=seed.device) ^ seed.long()) * 0x7FEB352D) & MASK
    rows = ((rows ^ (rows >> 15)) * 0x846CA68B) & MASK
    columns = (torch.arange(num_columns, device=seed.device) * 0x85EBCA6B) & MASK
    words = ((rows[:, None] ^ columns) * 0x9E3779B1) & MASK
    return (words >= round(dropout * 2**24) << 8).double() / (1 - dropout)


class Plain:
    """The operations of `gpu.training.operations` in plain torch."""

    @staticmethod
    def attention(
        h: Tensor, weight: Tensor, bias: Tensor, readers: Tensor, seeds: Tensor, index: int, heads: int, dropout: float
    ) -> tuple[Tensor, ...]:
        batch, length, width = h.shape
        qkv = functional.linear(h, weight, bias)
        query, key, value = qkv.view(batch, length, 3, heads, width // heads).permute(2, 0, 3, 1, 4)
        mask = readers <= torch.arange(length, device=h.device)[:, None]
        scores = (query @ key.mT / query.shape[-1] ** 0.5).masked_fill(~mask, -torch.inf)
        shares = scores.masked_fill(~mask.any(dim=1)[:, None], 0.0).softmax(dim=-1) * mask
        if dropout:
            shares = shares * kept(seeds[index], batch * heads * length, length, dropout).view_as(shares)
        return ((shares @ value).transpose(1, 2).flatten(2),)

    @staticmethod
    def linear_add_norm(
        a: Tensor,
        weight: Tensor,
        bias: Tensor,
        x: Tensor,
        gain: Tensor,
        shift: Tensor,
        seeds: Tensor,
        index: int,
        dropout: float,
    ) -> tuple[Tensor, ...]:
        branch = functional.linear(a, weight, bias)
        if dropout:
            branch = branch * kept(seeds[index], branch[..., 0].numel(), branch.shape[-1], dropout).view_as(branch)
        return x + branch, functional.layer_norm(x + branch, x.shape[-1:], gain, shift)

    @staticmethod
    def mlp(
        h: Tensor,
        up: Tensor,
        up_bias: Tensor,
        down: Tensor,
        down_bias: Tensor,
        x: Tensor,
        gain: Tensor,
        shift: Tensor,
        seeds: Tensor,
        index: int,
        dropout: float,
    ) -> tuple[Tensor, ...]:
        hidden = functional.gelu(functional.linear(h, up, up_bias))
        return Plain.linear_add_norm(hidden, down, down_bias, x, gain, shift, seeds, index, dropout)

    @staticmethod
    def dropout_norm(
        x: Tensor, gain: Tensor, shift: Tensor, seeds: Tensor, index: int, dropout: float
    ) -> tuple[Tensor, ...]:
        if dropout:
            x = x * kept(seeds[index], x[..., 0].numel(), x.shape[-1], dropout).view_as(x)
        return x, functional.layer_norm(x, x.shape[-1:], gain, shift)


@pytest.mark.parametrize("goal_dims", [(), (1,), (2, 0)])
@pytest.mark.parametrize("rewards", [True, False])
@pytest.mark.parametrize("mapped", [True, False])
def test_the_fused_loss_and_its_gradients_equal_those_of_the_model(
    tiny_dataset: Dataset, goal_dims: tuple[int, ...], rewards: bool, mapped: bool
) -> None:
    dataset = with_maps(tiny_dataset) if mapped else tiny_dataset
    tokens = TokenConfig(num_bins=9, goal_dims=goal_dims, rewards=rewards)
    model = TrajectoryModel.create(dataset, tokens, MODEL, seed=0)
    torch.nn.init.normal_(model.gpt.position_embedding, std=0.1)
    data = tokenize(dataset, model.tokenizer)
    batch = gather_windows(data, torch.arange(data.num_windows), MODEL.window, model.tokenizer)
    weights = dict(model.gpt.named_parameters())
    expected, expected_by_token = weighted_loss(model, batch, 5.0)
    found, by_token = fused_loss(
        model,
        weights,
        batch,
        action_weight=5.0,
        dropout=0.0,
        seeds=torch.zeros(7, dtype=torch.int32),
        operations=Plain(),
    )
    torch.testing.assert_close(by_token, expected_by_token, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
    grads, others = (torch.autograd.grad(loss, list(weights.values())) for loss in (expected, found))
    for name, grad, other in zip(weights, grads, others, strict=True):
        torch.testing.assert_close(other, grad, rtol=1e-4, atol=1e-6, msg=name)


@pytest.mark.parametrize("kind", ["adamw", "adam"])
def test_a_step_on_flat_weights_equals_a_step_of_adamw(tiny_dataset: Dataset, kind: Literal["adamw", "adam"]) -> None:
    config = TrainConfig(optimizer=kind)
    flat, plain = (TrajectoryModel.create(tiny_dataset, TokenConfig(num_bins=9), MODEL, seed=0).gpt for _ in range(2))
    holder, optimizer = make_optimizer(flat, config), make_optimizer(plain, config)
    flat_optimizer = FlatAdamW(flat, holder, config, compiled=False)
    generator = torch.Generator().manual_seed(0)
    for step, rate in enumerate((1e-2, 3e-3, 1e-3)):
        factors = {name: torch.randn(each.shape, generator=generator) for name, each in plain.named_parameters()}
        flat_optimizer.rate.fill_(rate)
        flat_optimizer.backward(
            torch.stack([(each.float() * factors[name]).sum() for name, each in flat_optimizer.weights.items()]).sum()
        )
        norm = flat_optimizer.update()
        for group in optimizer.param_groups:
            group["lr"] = rate
        for name, each in plain.named_parameters():
            each.grad = factors[name].to(flat_optimizer.weights[name].dtype).float()
        expected_norm = torch.nn.utils.clip_grad_norm_(plain.parameters(), GRAD_CLIP)
        assert float(norm) > GRAD_CLIP, "gradients are clipped"
        torch.testing.assert_close(norm, expected_norm, rtol=1e-5, atol=0)
        optimizer.step()
        for (name, found), expected in zip(flat.named_parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6, msg=f"{name} after step {step}")
            assert torch.equal(flat_optimizer.weights[name], found.to(flat_optimizer.weights[name].dtype))
            for moment in ("step", "exp_avg", "exp_avg_sq"):
                torch.testing.assert_close(holder.state[found][moment], optimizer.state[expected][moment])


@pytest.mark.parametrize(("width", "num_heads", "head"), [(32, 4, 8), (512, 4, 128), (48, 2, 24), (96, 6, 16)])
def test_sizes_that_the_kernels_do_not_support_are_refused(
    tiny_dataset: Dataset, width: int, num_heads: int, head: int
) -> None:
    sizes = ModelConfig(window=2, num_layers=1, num_heads=num_heads, width=width)
    model = TrajectoryModel.create(tiny_dataset, TokenConfig(num_bins=4), sizes, seed=0)
    reason = why_not_fused_training(model) or ""
    assert reason.endswith(f"both powers of two, the model has {width} and {head}")


def test_the_kernels_need_bfloat16(tiny_dataset: Dataset, monkeypatch: pytest.MonkeyPatch) -> None:
    model = TrajectoryModel.create(tiny_dataset, TokenConfig(num_bins=4), MODEL, seed=0)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda *_, **__: False)
    assert why_not_fused_training(model) == "it needs a GPU with bfloat16"
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda *_, **__: True)
    assert why_not_fused_training(model) is None


@dataclass(frozen=True)
class Chosen:
    """One operation with fixed settings: tensors to its first results."""

    place: object
    name: str
    num_results: int
    settings: tuple[object, ...]

    def __call__(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        results: tuple[Tensor, ...] = getattr(self.place, self.name)(*inputs, *self.settings)
        return results[: self.num_results]


def worst_error(operation: Chosen, plain: Chosen, inputs: Sequence[Tensor]) -> float:
    """The largest difference in results and gradients, relative to the largest entry."""
    exact = [each.detach().double().requires_grad_() for each in inputs]
    found, expected = operation(*inputs), plain(*exact)
    weights = [torch.randn(each.shape, generator=torch.Generator().manual_seed(1)).to(each.device) for each in expected]
    pairs = zip(found, weights, strict=True)
    found_grads = torch.autograd.grad([(each.float() * weight).sum() for each, weight in pairs], inputs)
    pairs = zip(expected, weights, strict=True)
    grads = torch.autograd.grad([(each * weight).sum() for each, weight in pairs], exact)
    both = zip([*found, *found_grads], [*expected, *grads], strict=True)
    return max(float((one.detach() - other.detach()).abs().max() / other.detach().abs().max()) for one, other in both)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("dtype", "tolerance", "dropout", "length", "heads", "width"),
    [
        (torch.float32, 1e-5, 0.25, 45, 2, 32),
        (torch.float32, 1e-5, 0.0, 250, 4, 128),
        (torch.bfloat16, 3e-2, 0.1, 160, 4, 128),
        (torch.bfloat16, 3e-2, 0.1, 160, 4, 256),
    ],
)
def test_kernels_equal_plain_operations(
    dtype: torch.dtype, tolerance: float, dropout: float, length: int, heads: int, width: int
) -> None:
    from trajectory_transformer.gpu.training import operations

    generator = torch.Generator("cuda").manual_seed(0)

    def draw(*shape: int, kind: torch.dtype = dtype) -> Tensor:
        scale = shape[-1] ** -0.5 if len(shape) == 2 else 1.0  # for matrices
        return (scale * torch.randn(shape, generator=generator, device="cuda")).to(kind).requires_grad_(True)

    seeds = torch.tensor([5, 123456789], device="cuda", dtype=torch.int32)
    readers = torch.arange(length, device="cuda", dtype=torch.int32)
    readers[::16] = length  # no row reads these
    norm = [draw(width, kind=torch.float32) for _ in range(2)]
    x = draw(3, length, width), draw(3, length, width)
    both = [draw(4 * width, width), draw(4 * width), draw(width, 4 * width), draw(width)]
    cases: dict[str, tuple[int, tuple[object, ...], list[Tensor]]] = {  # results compared, settings, inputs
        "attention": (1, (readers, seeds, 1, heads, dropout), [x[0], draw(3 * width, width), draw(3 * width)]),
        "linear_add_norm": (2, (seeds, 1, dropout), [x[0], draw(width, width), draw(width), x[1], *norm]),
        "mlp": (2, (seeds, 1, dropout), [x[0], *both, x[1], *norm]),
        "dropout_norm": (2, (seeds, 1, dropout), [x[0], *norm]),
    }
    for name, (count, settings, inputs) in cases.items():
        assert (
            worst_error(Chosen(operations, name, count, settings), Chosen(Plain, name, count, settings), inputs)
            < tolerance
        ), name
