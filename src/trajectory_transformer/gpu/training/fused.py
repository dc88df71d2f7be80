"""The fused training engine: a bfloat16 loss of few large kernels, and AdamW over one flat tensor.

The model is too small to keep a GPU busy one operation at a time. This is the forward pass of `model.gpt`, optimised
for speed:

- Sequences are shifted by one: entry 0 is empty, entry j holds token j - 1, so token j is predicted at entry j. A
  window is then W whole transitions, and heads, embeddings and targets are batched over slots without copies.
- Embedding lookups are matmuls with one-hot rows: their gradients need no atomics and are deterministic.
- Weights are float32 in one flat tensor; matmuls read bfloat16 copies that the optimizer writes.
"""

from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional

from trajectory_transformer.config import TrainConfig
from trajectory_transformer.gpu.training.captured import captured_step, supports_bf16
from trajectory_transformer.model.gpt import GPT, detach_key_bias
from trajectory_transformer.model.trajectory_model import TrajectoryModel
from trajectory_transformer.tokens.windows import Batch, loss_weights
from trajectory_transformer.training.engine import Outcome
from trajectory_transformer.training.optim import (
    GRAD_CLIP,
    RECIPES,
    load_optimizer_state,
    make_optimizer,
    optimizer_state,
)

LOW = torch.bfloat16


class Operations(Protocol):
    """Fused operations, see `gpu.training.operations`. Operation `index` seeds its dropout with `seeds[index]`."""

    def attention(
        self,
        h: Tensor,
        weight: Tensor,
        bias: Tensor,
        readers: Tensor,
        seeds: Tensor,
        index: int,
        heads: int,
        dropout: float,
    ) -> tuple[Tensor, ...]:
        """QKV projection and attention; rows i >= `readers[j]` attend to column j."""

    def linear_add_norm(
        self,
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
        """Linear layer, dropout and residual connection [B, L, width], and the layer norm of the result."""

    def mlp(
        self,
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
        """Two linear layers with a GELU, dropout, residual connection, and the layer norm of the result."""

    def dropout_norm(
        self, x: Tensor, gain: Tensor, shift: Tensor, seeds: Tensor, index: int, dropout: float
    ) -> tuple[Tensor, ...]:
        """Dropout [B, L, width], and the layer norm of the result."""


def why_not_fused_training(model: TrajectoryModel) -> str | None:
    """Return why the fused engine does not support a model, or None if it does."""
    width, head = model.gpt.config.width, model.gpt.config.width // model.gpt.config.num_heads
    if any(size & (size - 1) for size in (width, head)) or head < 16 or width > 256:
        return (
            "it needs a width of at most 256 and heads of at least 16, both powers of two, "
            f"the model has {width} and {head}"
        )
    return None if supports_bf16() else "it needs a GPU with bfloat16"


def fused_loss(
    model: TrajectoryModel,
    weights: Mapping[str, Tensor],
    batch: Batch,
    *,
    action_weight: float,
    dropout: float,
    seeds: Tensor,
    operations: Operations | ModuleType,
) -> tuple[Tensor, Tensor]:
    """`weighted_loss` for the given weights: the mean loss, and the cross-entropy of each prediction [B, L']."""
    gpt = model.gpt
    goals = gpt.layout.goal_dim
    slots = _transposed(batch.tokens[:, goals:].reshape(-1, gpt.layout.size))  # [D, B * W]
    x = _embed(gpt, weights, batch, slots)
    norm = weights["blocks.0.norm1.weight"], weights["blocks.0.norm1.bias"]
    x, h = operations.dropout_norm(x, *norm, seeds, 3 * gpt.config.num_layers, dropout)[:2]
    readers = _readers(gpt, batch.tokens.shape[1], x.device)
    last = gpt.config.num_layers - 1
    for layer in range(last + 1):
        own = {name: weights[f"blocks.{layer}.{name}"] for name in _BLOCK}
        after = f"blocks.{layer + 1}.norm1" if layer < last else "norm"
        linear = own["qkv.weight"], detach_key_bias(own["qkv.bias"])
        attended = operations.attention(h, *linear, readers, seeds, 3 * layer, gpt.config.num_heads, dropout)[0]
        norm = own["norm2.weight"], own["norm2.bias"]
        branch = own["out.weight"], own["out.bias"]
        x, h = operations.linear_add_norm(attended, *branch, x, *norm, seeds, 3 * layer + 1, dropout)[:2]
        norm = weights[f"{after}.weight"], weights[f"{after}.bias"]
        both = own["up.weight"], own["up.bias"], own["down.weight"], own["down.bias"]
        x, h = operations.mlp(h, *both, x, *norm, seeds, 3 * layer + 2, dropout)[:2]
    logits = _logits(gpt, weights["heads"], h)
    by_token = logits.logsumexp(dim=-1) - logits.gather(-1, slots[..., None])[..., 0]
    by_token = _transposed(by_token).reshape(len(batch.tokens), -1)[:, 0 if goals else 1 :]
    counted = loss_weights(batch, model.tokenizer, action_weight)[:, -by_token.shape[1] :]
    return (by_token * counted).mean(), by_token


_BLOCK = ["norm2.weight", "norm2.bias"] + [
    f"{layer}.{kind}" for layer in ("qkv", "out", "up", "down") for kind in ("weight", "bias")
]


def _embed(gpt: GPT, weights: Mapping[str, Tensor], batch: Batch, slots: Tensor) -> Tensor:
    """Embed tokens, positions and maps, shifted by one entry: tokens [B, L] -> [B, L, width]."""
    goals, bins = gpt.layout.goal_dim, gpt.num_bins
    table = weights["token_embedding.weight"]
    num_slots = goals + gpt.layout.size
    # Pad each table with copies of the stop embedding to a multiple of 8, for efficient matmuls; no token uses them.
    stop = table[-1].expand(num_slots, _padded(bins + 1) - bins, -1)
    by_slot = torch.cat([table[:-1].view(num_slots, bins, -1), stop], dim=1)
    parts = [_look_up(slots, by_slot[goals:]).reshape(len(batch.tokens), -1, table.shape[-1])]
    if goals:
        parts.insert(0, _look_up(_transposed(batch.tokens[:, :goals]), by_slot[:goals]))
    embedded = torch.cat(parts, dim=1) if goals else parts[0]
    embedded = embedded[:, :-1] + weights["position_embedding"]
    if gpt.map_encoder is not None:
        assert batch.maps is not None
        own = {name: weights[f"map_encoder.{name}"] for name, _ in gpt.map_encoder.named_parameters()}
        embedded = embedded + functional_call(gpt.map_encoder, own, (batch.maps,))[:, None]
    return functional.pad(embedded, (0, 0, 1, 0)).to(table.dtype)


def _look_up(tokens: Tensor, tables: Tensor) -> Tensor:
    """Look up rows in each slot's own table: tokens [S, N], tables [S, V, width] -> [N, S, width]."""
    one_hot = tokens[..., None] == torch.arange(tables.shape[1], device=tokens.device)
    return torch.bmm(one_hot.to(tables.dtype), tables).transpose(0, 1)


def _readers(gpt: GPT, length: int, device: torch.device) -> Tensor:
    """First row that attends to each entry: its own index, or `length` if the entry is empty or holds a value."""
    readable = functional.pad(gpt.readable[: length - 1], (1, 0))
    return torch.where(readable, torch.arange(length, device=device, dtype=torch.int32), length)


def _logits(gpt: GPT, heads: Tensor, h: Tensor) -> Tensor:
    """Apply each slot's head at the entries that predict it: h [B, L, width] -> [D, B * W, V + 1]."""
    heads = functional.pad(heads, (0, 0, 0, _padded(gpt.num_bins + 1) - gpt.num_bins - 1))
    entries = h[:, gpt.layout.goal_dim :].reshape(-1, gpt.layout.size, h.shape[-1])
    return torch.bmm(entries.transpose(0, 1), heads.mT)[..., : gpt.num_bins + 1].float()


def _padded(size: int) -> int:
    return -(-size // 8) * 8


def _transposed(x: Tensor) -> Tensor:
    return x.transpose(0, 1)


class FlatAdamW:
    """AdamW over one flat tensor of all weights.

    Its moments are views in the state of a standard optimizer, so checkpoints are compatible with the other engines.
    """

    def __init__(self, gpt: nn.Module, optimizer: torch.optim.AdamW, config: TrainConfig, *, compiled: bool) -> None:
        """Move a model's parameters and a new optimizer's state to flat tensors."""
        rounded = {name: parameter for name, parameter in gpt.named_parameters() if not _stays_float(name)}
        others = {name: parameter for name, parameter in gpt.named_parameters() if _stays_float(name)}
        parameters = rounded | others
        decay = {id(each): group["weight_decay"] for group in optimizer.param_groups for each in group["params"]}
        self._flat = torch.cat([parameter.detach().flatten() for parameter in parameters.values()])
        self._decay = torch.cat(
            [torch.full_like(each.detach().flatten(), decay[id(each)]) for each in parameters.values()]
        )
        self._moments = [torch.zeros_like(self._flat) for _ in range(2)]
        self._step = torch.zeros((), device=self._flat.device)
        self._rounded = self._flat[: sum(parameter.numel() for parameter in rounded.values())].to(LOW)
        self.weights: dict[str, Tensor] = {}
        start = 0
        for name, parameter in parameters.items():
            place = slice(start, start + parameter.numel())
            parameter.data = self._flat[place].view_as(parameter)
            first, second = (moment[place].view_as(parameter) for moment in self._moments)
            optimizer.state[parameter] = {"step": self._step, "exp_avg": first, "exp_avg_sq": second}
            source = self._rounded if name in rounded else self._flat
            self.weights[name] = source[place].view_as(parameter).detach().requires_grad_()
            start = place.stop
        self._num_rounded = len(rounded)
        self._grads: tuple[Tensor, ...] = ()
        self._betas = RECIPES[config.optimizer].betas
        self._update: Callable[..., Tensor] = torch.compile(adamw) if compiled else adamw
        self.rate = torch.zeros((), device=self._flat.device)

    def refresh(self) -> None:
        """Update the bfloat16 copies after loading weights."""
        self._rounded.copy_(self._flat[: len(self._rounded)])

    def backward(self, loss: Tensor) -> None:
        """Compute the gradients of a loss with respect to `weights`."""
        self._grads = torch.autograd.grad(loss, list(self.weights.values()))

    @torch.no_grad()
    def update(self) -> Tensor:
        """Take one optimizer step and return the gradient norm before clipping."""
        parts = [
            torch.cat([grad.flatten() for grad in grads])
            for grads in (self._grads[: self._num_rounded], self._grads[self._num_rounded :])
        ]
        self._grads = ()
        return self._update(
            self._flat,
            self._rounded,
            *self._moments,
            self._step,
            *parts,
            decay=self._decay,
            rate=self.rate,
            betas=self._betas,
            clip=GRAD_CLIP,
        )


def adamw(
    weights: Tensor,
    rounded: Tensor,
    mean: Tensor,
    square: Tensor,
    step: Tensor,
    *grads: Tensor,
    decay: Tensor,
    rate: Tensor,
    betas: tuple[float, float],
    clip: float,
) -> Tensor:
    """Clip gradients and update flat tensors in place; `rounded` mirrors the first weights. Returns the norm."""
    grad = torch.cat([part.float() for part in grads])
    norm: Tensor = torch.linalg.vector_norm(grad)
    grad = grad * (clip / (norm + 1e-6)).clamp(max=1.0)
    step.add_(1)
    mean.lerp_(grad, 1 - betas[0])
    square.mul_(betas[1]).addcmul_(grad, grad, value=1 - betas[1])
    spread = square.sqrt() / (1 - betas[1] ** step).sqrt() + 1e-8
    weights.copy_(weights * (1 - rate * decay) - rate / (1 - betas[0] ** step) * mean / spread)
    rounded.copy_(weights[: len(rounded)])
    return norm


def _stays_float(name: str) -> bool:
    """Whether a parameter stays float32: layer norms and positions are not used in matmuls."""
    return "norm" in name or name == "position_embedding"


class FusedEngine:
    """Computes loss, gradients and update in bfloat16, captured as one CUDA graph."""

    def __init__(self, model: TrajectoryModel, config: TrainConfig) -> None:
        """Train a model on a GPU."""
        from trajectory_transformer.gpu.training import operations  # imports triton

        self._model = model
        self._adamw = make_optimizer(model.gpt, config, capturable=True)
        self._optimizer = FlatAdamW(model.gpt, self._adamw, config, compiled=True)
        self._num_seeds = 3 * model.gpt.config.num_layers + 1  # the last one is for the embeddings

        def loss(
            weights: Mapping[str, Tensor], tokens: Tensor, real: Tensor, maps: Tensor | None, seeds: Tensor
        ) -> tuple[Tensor, Tensor]:
            return fused_loss(
                model,
                weights,
                Batch(tokens, real, maps),
                action_weight=config.action_weight,
                dropout=model.gpt.config.dropout,
                seeds=seeds,
                operations=operations,
            )

        self._loss: Callable[..., tuple[Tensor, Tensor]] = torch.compile(loss, dynamic=False)
        self._take_step = captured_step(self.compute)

    def step(self, batch: Batch, learning_rate: float) -> Outcome:
        """Take one optimizer step on a batch."""
        self._optimizer.rate.fill_(learning_rate)
        return self._take_step(batch)

    def compute(self, batch: Batch) -> Outcome:
        """Forward, backward and update."""
        loss, by_token = self.forward(batch)
        self.backward(loss)
        return Outcome(loss.detach(), by_token.detach(), self.update())

    def forward(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Return the loss, and the cross-entropy of each prediction."""
        seeds = torch.randint(2**31 - 1, (self._num_seeds,), device=batch.tokens.device, dtype=torch.int32)
        return self._loss(self._optimizer.weights, batch.tokens, batch.real, batch.maps, seeds)

    def backward(self, loss: Tensor) -> None:
        """Compute the gradients of the loss."""
        self._optimizer.backward(loss)

    def update(self) -> Tensor:
        """Take one optimizer step and return the gradient norm before clipping."""
        return self._optimizer.update()

    def state(self) -> dict[str, Tensor]:
        """Return the optimizer state by name, for checkpoints."""
        return optimizer_state(self._model.gpt, self._adamw)

    def load_state(self, tensors: Mapping[str, Tensor]) -> None:
        """Restore `state`. Load the model's weights first."""
        load_optimizer_state(self._model.gpt, self._adamw, tensors)
        self._optimizer.refresh()
