"""Networks of many learners at once: tensors with a leading dimension, in one flat buffer per optimizer.

N networks of the same shape are computed by one batched matmul. N is the number of learners S, or 2 S for twin critics
(those of a learner are neighbours). A group is what one optimizer updates. All of its tensors are views of one buffer,
so an update of the optimizer or of a target network is a few kernels, whatever the number of tensors.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from trajectory_transformer.randomness import stream_seed

Tensors = dict[str, Tensor]
Schedule = Callable[[Tensor], Tensor]
"""Updates taken so far -> factor of the learning rate, both scalars on the device."""
HiddenLayers = Callable[[Tensor, Sequence[Tensor], Sequence[Tensor]], Tensor]
"""Computes what `hidden_layers` does."""

_WEIGHTS = 0x77  # the random stream of initial weights


class Network(NamedTuple):
    """Shape of a multilayer perceptron and how it is initialised."""

    sizes: tuple[int, ...]  # input, hidden layers, output
    per_learner: int = 1
    orthogonal: bool = False  # orthogonal weights with gain sqrt(2) and biases of 0, else uniform as in torch.nn.Linear


def init_networks(networks: Mapping[str, Network], seeds: Sequence[int]) -> Tensors:
    """Initial weights `name.layer.weight` [N, in, out] and `name.layer.bias` [N, 1, out].

    Those of a learner are a function of its seed alone.
    """
    made: dict[str, list[Tensor]] = {}
    for seed in seeds:
        generator = torch.Generator().manual_seed(stream_seed(seed, _WEIGHTS))
        for name, network in networks.items():
            for _ in range(network.per_learner):
                for key, value in _init_one(network, generator).items():
                    made.setdefault(f"{name}.{key}", []).append(value)
    return {name: torch.stack(values) for name, values in made.items()}


def _init_one(network: Network, generator: torch.Generator) -> Tensors:
    tensors: Tensors = {}
    for layer, (inputs, outputs) in enumerate(zip(network.sizes, network.sizes[1:], strict=False)):
        if network.orthogonal:
            weight = torch.nn.init.orthogonal_(torch.empty(inputs, outputs), math.sqrt(2.0), generator=generator)
            bias = torch.zeros(1, outputs)
        else:
            bound = 1.0 / math.sqrt(inputs)
            weight = torch.empty(inputs, outputs).uniform_(-bound, bound, generator=generator)
            bias = torch.empty(1, outputs).uniform_(-bound, bound, generator=generator)
        tensors |= {f"{layer}.weight": weight, f"{layer}.bias": bias}
    return tensors


def mlp(tensors: Tensors, name: str, x: Tensor, *, layer_norm: bool = False) -> Tensor:
    """Perceptrons with ReLU between layers, before it normalised if asked for: x [N, B, in] -> [N, B, out]."""
    layer = 0
    while f"{name}.{layer}.weight" in tensors:
        if layer:
            x = torch.relu(functional.layer_norm(x, x.shape[-1:]) if layer_norm else x)
        # An addition of its own instead of baddbmm: a compiler can fuse it with the ReLU.
        x = torch.bmm(x, tensors[f"{name}.{layer}.weight"]) + tensors[f"{name}.{layer}.bias"]
        layer += 1
    return x


def repeat(x: Tensor, count: int) -> Tensor:
    """Inputs of `count` networks per learner: [S, ...] -> [S * count, ...]."""
    return x[:, None].expand(-1, count, *x.shape[1:]).reshape(-1, *x.shape[1:])


def frozen(tensors: Tensors) -> Tensors:
    """The same networks as constants, for a loss that trains others."""
    return {name: value.detach() for name, value in tensors.items()}


def twin_q(tensors: Tensors, observations: Tensor, actions: Tensor, *, layer_norm: bool = False) -> Tensor:
    """Values of two Q networks per learner, named `q`: [S, B, O] and [S, B, A] -> [S, 2, B]."""
    inputs = repeat(torch.cat([observations, actions], dim=-1), 2)
    return mlp(tensors, "q", inputs, layer_norm=layer_norm).view(-1, 2, inputs.shape[1])


def hidden_layers(x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor]) -> Tensor:
    """Linear layers, each followed by a ReLU, in the type of x: x [N, B, in], biases [N, 1, out] -> [N, B, out]."""
    for weight, bias in zip(weights, biases, strict=True):
        x = torch.relu(torch.bmm(x, weight.to(x.dtype)) + bias).to(x.dtype)
    return x


def rounded_twin_q(
    tensors: Tensors, observations: Tensor, actions: Tensor, hidden: HiddenLayers = hidden_layers
) -> Tensor:
    """`twin_q` with hidden layers in bfloat16, for constant observations and actions; `hidden` computes them."""
    inputs = repeat(torch.cat([observations, actions], dim=-1), 2).bfloat16()
    depth = sum(name.startswith("q.") and name.endswith("weight") for name in tensors)
    weights, biases = ([tensors[f"q.{layer}.{kind}"] for layer in range(depth)] for kind in ("weight", "bias"))
    last = hidden(inputs, weights[:-1], biases[:-1])
    # Not a matmul: a compiler reads `last` once and does not write it in float32.
    values = (last.float() * weights[-1].mT).sum(dim=-1) + biases[-1][..., 0]
    return values.view(-1, 2, inputs.shape[1])


class Copy:
    """A slowly following copy of a group: a target network."""

    def __init__(self, group: "Group") -> None:
        """Start with the group's weights."""
        self.flat = group.flat.clone()
        self.tensors = _views(self.flat, group.tensors)

    @torch.no_grad()
    def follow(self, group: "Group", rate: float) -> None:
        """Move a share `rate` of the way to the group's weights."""
        self.flat.lerp_(group.flat, rate)


class Group:
    """Tensors that one Adam optimizer updates."""

    def __init__(
        self,
        tensors: Tensors,
        learning_rate: float,
        *,
        device: torch.device,
        schedule: Schedule | None = None,
        betas: tuple[float, float] = (0.9, 0.999),
        weight_decay: float = 0.0,
    ) -> None:
        """Copy the tensors to one buffer. `weight_decay` is decoupled from the gradient, as in AdamW."""
        self.schedule = schedule
        self.betas = betas
        self.weight_decay = weight_decay
        self.flat = torch.cat([value.reshape(-1) for value in tensors.values()]).to(device)
        self.tensors = {name: view.requires_grad_() for name, view in _views(self.flat, tensors).items()}
        self.first, self.second = torch.zeros_like(self.flat), torch.zeros_like(self.flat)
        self.count = torch.zeros((), device=device)  # updates taken
        self._rate = torch.tensor(learning_rate, device=device)
        self._adam = adam

    def minimize(self, loss: Tensor) -> None:
        """Take one step on a loss, a scalar: the sum of the learners' losses."""
        gradients = torch.autograd.grad(loss, list(self.tensors.values()))
        self.apply(gradients)

    @torch.no_grad()
    def apply(self, gradients: Sequence[Tensor]) -> None:
        """Take one step with gradients in the order of `tensors`."""
        flat = torch.cat([gradient.reshape(-1) for gradient in gradients])
        rate = self._rate if self.schedule is None else self._rate * self.schedule(self.count)
        self._adam(self.flat, flat, self.first, self.second, self.count, rate, self.betas, self.weight_decay)

    def compile(self) -> None:
        """Replace the update by one kernel."""
        self._adam = torch.compile(adam, dynamic=False)

    def state(self) -> Tensors:
        """State of the optimizer, to resume from."""
        return {"first": self.first, "second": self.second, "count": self.count}


def adam(
    flat: Tensor,
    gradient: Tensor,
    first: Tensor,
    second: Tensor,
    count: Tensor,
    rate: Tensor,
    betas: tuple[float, float],
    weight_decay: float,
    epsilon: float = 1e-8,
) -> None:
    """One step of Adam on a flat buffer, in place; nothing here waits for the device."""
    count += 1.0
    first.lerp_(gradient, 1.0 - betas[0])
    second.mul_(betas[1]).addcmul_(gradient, gradient, value=1.0 - betas[1])
    correction = [-torch.expm1(count * math.log(beta)) for beta in betas]  # 1 - beta^count without cancellation
    if weight_decay:
        flat.mul_(1.0 - rate * weight_decay)
    denominator = (second / correction[1]).sqrt() + epsilon
    flat.sub_(rate / correction[0] * first / denominator)


def cosine(total: int) -> Schedule:
    """Decay from 1 to 0 over `total` updates."""
    return lambda count: 0.5 * (1.0 + torch.cos((count / total).clamp(max=1.0) * math.pi))


def _views(flat: Tensor, like: Tensors) -> Tensors:
    """Tensors of the shapes of `like` that share the storage of a buffer."""
    views, start = {}, 0
    for name, value in like.items():
        views[name] = flat[start : start + value.numel()].view(value.shape).detach()
        start += value.numel()
    return views
