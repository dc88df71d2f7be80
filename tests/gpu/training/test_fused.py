"""The fast pass is the model's own; its kernels are what they say; recorded steps are the steps they record."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional

from trajectory_transformer.config import ModelConfig, TokenConfig, TrainConfig
from trajectory_transformer.data.episode import Dataset
from trajectory_transformer.gpu.training.fused import FlatAdamW, fast_loss, fits
from trajectory_transformer.model.trajectory_model import TrajectoryModel
from trajectory_transformer.tokens.windows import gather_windows, tokenize
from trajectory_transformer.training.loss import weighted_loss
from trajectory_transformer.training.optim import make_optimizer
from trajectory_transformer.training.train import Trainer

MODEL = ModelConfig(window=3, num_layers=2, num_heads=2, width=32, dropout=0.0)
MASK = 2**32 - 1


def with_maps(dataset: Dataset) -> Dataset:
    """The same episodes, each with a map of its own."""
    rng = np.random.default_rng(0)
    maps = [rng.integers(2, size=(2, 6, 6)).astype(np.uint8) for _ in dataset.episodes]
    pairs = zip(dataset.episodes, maps, strict=True)
    return replace(dataset, episodes=tuple(replace(episode, map=map) for episode, map in pairs))


def kept(seed: Tensor, num_rows: int, num_columns: int, dropout: float) -> Tensor:
    """What dropout keeps of a matrix, times how much it grows."""
    rows = ((torch.arange(num_rows, device=seed.device) ^ seed.long()) * 0x7FEB352D) & MASK
    rows = ((rows ^ (rows >> 15)) * 0x846CA68B) & MASK
    columns = (torch.arange(num_columns, device=seed.device) * 0x85EBCA6B) & MASK
    words = ((rows[:, None] ^ columns) * 0x9E3779B1) & MASK
    return (words >= round(dropout * 2**24) << 8).double() / (1 - dropout)


class Plain:
    """The operations of `training.operations` written out."""

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
    def perceptron(
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
def test_the_fast_pass_is_the_model_and_so_are_its_gradients(
    tiny_dataset: Dataset, goal_dims: tuple[int, ...], rewards: bool, mapped: bool
) -> None:
    dataset = with_maps(tiny_dataset) if mapped else tiny_dataset
    tokens = TokenConfig(num_bins=9, goal_dims=goal_dims, rewards=rewards)
    model = TrajectoryModel.create(dataset, tokens, MODEL, seed=0)
    torch.nn.init.normal_(model.gpt.position_embedding, std=0.1)
    data = tokenize(dataset, model.discretizer, model.layout, tokens)
    batch = gather_windows(data, torch.arange(data.num_windows), MODEL.window, model.layout, tokens)
    weights = dict(model.gpt.named_parameters())
    expected, expected_by_token = weighted_loss(model, batch, 5.0)
    found, by_token = fast_loss(
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


def test_one_step_over_all_weights_is_a_step_of_adamw(tiny_dataset: Dataset) -> None:
    config = TrainConfig(weight_decay=0.3, grad_clip=0.5, betas=(0.9, 0.95))
    flat, plain = (TrajectoryModel.create(tiny_dataset, TokenConfig(num_bins=9), MODEL, seed=0).gpt for _ in range(2))
    holder, optimizer = make_optimizer(flat, config), make_optimizer(plain, config)
    fast = FlatAdamW(flat, holder, config, compiled=False)
    generator = torch.Generator().manual_seed(0)
    for step, rate in enumerate((1e-2, 3e-3, 1e-3)):
        factors = {name: torch.randn(each.shape, generator=generator) for name, each in plain.named_parameters()}
        fast.rate.fill_(rate)
        fast.backward(torch.stack([(each.float() * factors[name]).sum() for name, each in fast.weights.items()]).sum())
        norm = fast.update()
        for group in optimizer.param_groups:
            group["lr"] = rate
        for name, each in plain.named_parameters():
            each.grad = factors[name].to(fast.weights[name].dtype).float()
        torch.testing.assert_close(norm, torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.5), rtol=1e-5, atol=0)
        optimizer.step()
        for (name, found), expected in zip(flat.named_parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6, msg=f"{name} after step {step}")
            assert torch.equal(fast.weights[name], found.to(fast.weights[name].dtype))
            for moment in ("step", "exp_avg", "exp_avg_sq"):
                torch.testing.assert_close(holder.state[found][moment], optimizer.state[expected][moment])


def test_kernels_are_for_gpus_and_for_sizes_they_are_made_for(tiny_model: TrajectoryModel) -> None:
    assert not fits(tiny_model)  # on a CPU


@dataclass(frozen=True)
class Chosen:
    """One operation with its settings given: tensors to its first results."""

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
def test_kernels_are_what_they_say(
    dtype: torch.dtype, tolerance: float, dropout: float, length: int, heads: int, width: int
) -> None:
    from trajectory_transformer.gpu.training import operations

    generator = torch.Generator("cuda").manual_seed(0)

    def draw(*shape: int, kind: torch.dtype = dtype) -> Tensor:
        scale = shape[-1] ** -0.5 if len(shape) == 2 else 1.0  # of matrices
        return (scale * torch.randn(shape, generator=generator, device="cuda")).to(kind).requires_grad_(True)

    seeds = torch.tensor([5, 123456789], device="cuda", dtype=torch.int32)
    readers = torch.arange(length, device="cuda", dtype=torch.int32)
    readers[::16] = length  # nobody reads these
    norm = [draw(width, kind=torch.float32) for _ in range(2)]
    x = draw(3, length, width), draw(3, length, width)
    both = [draw(4 * width, width), draw(4 * width), draw(width, 4 * width), draw(width)]
    cases: dict[str, tuple[int, tuple[object, ...], list[Tensor]]] = {  # results compared, settings, inputs
        "attention": (1, (readers, seeds, 1, heads, dropout), [x[0], draw(3 * width, width), draw(3 * width)]),
        "linear_add_norm": (2, (seeds, 1, dropout), [x[0], draw(width, width), draw(width), x[1], *norm]),
        "perceptron": (2, (seeds, 1, dropout), [x[0], *both, x[1], *norm]),
        "dropout_norm": (2, (seeds, 1, dropout), [x[0], *norm]),
    }
    for name, (count, settings, inputs) in cases.items():
        assert (
            worst_error(Chosen(operations, name, count, settings), Chosen(Plain, name, count, settings), inputs)
            < tolerance
        ), name


def cuda_trainer(dataset: Dataset, config: TrainConfig) -> Trainer:
    """A small run on a GPU, with dropout."""
    device = torch.device("cuda")
    model = TrajectoryModel.create(dataset, TokenConfig(num_bins=9), replace(MODEL, dropout=0.2), seed=0)
    data = tokenize(dataset, model.discretizer, model.layout, model.tokens).to(device)
    model.gpt.to(device)
    return Trainer(model, data, config)


def losses_of(trainer: Trainer, steps: int | None = None) -> list[float]:
    """The loss of every step, of so many or all."""
    losses = []
    for metrics in trainer.run():
        assert metrics is not None
        losses.append(metrics.loss)
        if len(losses) == steps:
            break
    return losses


SHORT = TrainConfig(steps=12, batch_size=8, learning_rate=1e-3, warmup_steps=2, log_every=1, seed=3)
IGNORED = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore:TensorFloat32 tensor cores:UserWarning")


@pytest.mark.gpu
@IGNORED
@pytest.mark.parametrize("mapped", [False, True])
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("precision", ["float32", "bf16"])
def test_recorded_steps_are_the_steps_run_one_by_one(
    tiny_dataset: Dataset, precision: str, compiled: bool, mapped: bool
) -> None:
    dataset = with_maps(tiny_dataset) if mapped else tiny_dataset
    config = replace(SHORT, precision=precision, compile=compiled)  # type: ignore[arg-type]
    one, other = (cuda_trainer(dataset, replace(config, graph=graph)) for graph in (True, False))
    assert losses_of(one) == pytest.approx(losses_of(other), rel=1e-5)
    for found, expected in zip(one.model.gpt.parameters(), other.model.gpt.parameters(), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.gpu
@IGNORED
@pytest.mark.parametrize(("stop_after", "mapped"), [(1, False), (5, False), (5, True)])  # a step is recorded after 2
def test_a_run_on_a_gpu_resumes_to_the_same_bits(
    tiny_dataset: Dataset, tmp_path: Path, stop_after: int, mapped: bool
) -> None:
    dataset = with_maps(tiny_dataset) if mapped else tiny_dataset
    whole = cuda_trainer(dataset, SHORT)
    losses = losses_of(whole)
    stopped = cuda_trainer(dataset, SHORT)
    losses_of(stopped, stop_after)
    stopped.save(tmp_path / "state.safetensors")
    resumed = cuda_trainer(dataset, SHORT)
    torch.manual_seed(0)
    resumed.load(tmp_path / "state.safetensors")
    assert losses_of(resumed) == losses[stop_after:]
    for found, expected in zip(resumed.model.gpt.parameters(), whole.model.gpt.parameters(), strict=True):
        assert torch.equal(found, expected)


@pytest.mark.gpu
@IGNORED
def test_a_run_moves_between_a_gpu_and_a_cpu(tiny_dataset: Dataset, tmp_path: Path) -> None:
    config = replace(SHORT, precision="auto", log_every=1)
    started = cuda_trainer(tiny_dataset, config)
    losses_of(started, 6)
    started.save(tmp_path / "state.safetensors")
    model = TrajectoryModel.create(tiny_dataset, TokenConfig(num_bins=9), replace(MODEL, dropout=0.2), seed=0)
    moved = Trainer(model, tokenize(tiny_dataset, model.discretizer, model.layout, model.tokens), config)
    moved.load(tmp_path / "state.safetensors")
    assert moved.step == 6
    assert len(losses_of(moved)) == 6
