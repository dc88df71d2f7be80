"""Decision Transformer: actions predicted from past returns-to-go, states and actions (Chen et al., 2021; 2106.01345).

A transformer of its own instead of the block of `model.gpt`: its weights are stacked over learners, and it has ReLU
instead of GELU, as in the authors' code.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from trajectory_transformer.baselines.algorithm import Actor, Algorithm, Preset, Settings, Sizes
from trajectory_transformer.baselines.data import Learner, Scaling, States
from trajectory_transformer.baselines.networks import Group, Tensors
from trajectory_transformer.baselines.windows import WindowBatch, Windows
from trajectory_transformer.config import require
from trajectory_transformer.data.episode import Dataset, FloatArray
from trajectory_transformer.randomness import STEP, logical_shift, mix, signed, stream_seed
from trajectory_transformer.rollout import Step

MAX_TIME = 1000  # time steps with an embedding of their own; later ones share the last
NORM_EPSILON = 1e-5
_WEIGHTS = 0xD7  # the random stream of initial weights


@dataclass(frozen=True, kw_only=True)
class DTSettings(Settings):
    """Settings of the paper for Gym (appendix A, table 9). There is one transformer block per entry of `hidden`."""

    steps: int = 100_000
    batch_size: int = 64
    learning_rate: float = 1e-4
    hidden: tuple[int, ...] = (128, 128, 128)
    states: States = "standard"
    tf32: bool = True
    bfloat16: bool = False
    """Train with matmuls in bfloat16: less memory to move on a GPU. Weights and residual stream stay in float32."""
    context: int = 20
    """Steps that the model sees, the current one included."""
    num_heads: int = 1
    """Attention heads per block."""
    dropout: float = 0.1
    """Dropout probability of embeddings, attention and residual branches during training."""
    weight_decay: float = 1e-4
    """Weight decay of AdamW."""
    warmup_steps: int = 10_000
    """Steps of linear warm-up."""
    max_gradient: float = 0.25
    """Largest norm of a learner's gradient."""
    return_scale: float = 1000.0
    """Returns are divided by this."""
    target_return: float = 0.0
    """Return that the policy asks for; 0: the best return in the data."""

    def __post_init__(self) -> None:
        """Refuse sizes that cannot be built."""
        super().__post_init__()
        require(len(set(self.hidden)) == 1, "hidden must be one width, repeated for every block", self.hidden)
        require(
            self.num_heads >= 1 and self.hidden[0] % self.num_heads == 0,
            f"the width of {self.hidden[0]} must be a multiple of num_heads",
            self.num_heads,
        )
        require(self.context >= 1, "context must be at least 1", self.context)
        require(0 <= self.dropout < 1, "dropout must lie in [0, 1)", self.dropout)
        require(self.return_scale > 0, "return_scale must be above 0", self.return_scale)


class DT(Algorithm[WindowBatch]):
    """A causal transformer over (return-to-go, state, action) triples; the token of a state predicts its action."""

    settings: DTSettings
    losses = ("loss",)

    def __init__(self, settings: DTSettings, sizes: Sizes, seeds: Sequence[int], device: torch.device) -> None:
        """Networks with random weights."""
        self.settings = settings
        each = [_init(settings, sizes, seed) for seed in seeds]
        tensors = {name: torch.stack([one[name] for one in each]) for name in each[0]}
        self.model = Group(
            tensors,
            settings.learning_rate,
            device=device,
            schedule=lambda count: ((count + 1.0) / max(settings.warmup_steps, 1)).clamp(max=1.0),
            weight_decay=settings.weight_decay,
        )
        # Not trained, but saved with the weights.
        self.best = Group({"return": torch.zeros(len(seeds), 1)}, 0.0, device=device)
        self.groups = {"model": self.model, "best": self.best}
        self.noise = 2 if settings.dropout else 0

    def rows(
        self, datasets: Sequence[Dataset], learners: Sequence[Learner], scaling: Scaling, device: torch.device
    ) -> Windows:
        """All windows; notes the best return of the data."""
        best = [max(episode.total_reward for episode in datasets[learner.dataset]) for learner in learners]
        self.best.tensors["return"].data.copy_(torch.tensor(best)[:, None])
        settings = self.settings
        return Windows(
            datasets, learners, scaling, device, context=settings.context, return_scale=settings.return_scale
        )

    def target(self) -> Tensor:
        """The scaled return that the policy of each learner asks for [S, 1]."""
        best = self.best.tensors["return"].detach()
        asked = torch.full_like(best, self.settings.target_return) if self.settings.target_return else best
        return asked / self.settings.return_scale

    def update(self, batch: WindowBatch, noise: Tensor, variant: str) -> dict[str, Tensor]:
        """Take one training step, with the gradient of each learner clipped."""
        loss = self.loss(batch, noise)
        gradients = torch.autograd.grad(loss.sum(), list(self.model.tensors.values()))
        squares = torch.stack([gradient.flatten(1).square().sum(1) for gradient in gradients])
        factor = (self.settings.max_gradient / (squares.sum(0).sqrt() + 1e-6)).clamp(max=1.0)  # [S]
        self.model.apply([gradient * factor.view(-1, *[1] * (gradient.ndim - 1)) for gradient in gradients])
        return {"actor": loss.detach()}

    def loss(self, batch: WindowBatch, noise: Tensor) -> Tensor:
        """Mean squared error of the actions at valid steps [S]."""
        kind, rounded = batch.returns.device.type, self.settings.bfloat16
        with torch.autocast(kind, torch.bfloat16, enabled=rounded, cache_enabled=False):
            predicted = self.forward(batch, noise if self.settings.dropout else None)
        error = (predicted - batch.actions).square().mean(dim=-1)
        return (error * batch.valid).sum(dim=(1, 2)) / batch.valid.sum(dim=(1, 2))

    def forward(self, batch: WindowBatch, noise: Tensor | None = None) -> Tensor:
        """Predicted actions [S, B, K, A]; `noise` [S, B, 2] chooses what dropout zeroes, None for no dropout."""
        tensors = self.model.tensors
        (learners, size, steps), width = batch.returns.shape, self.settings.hidden[0]
        time = _rows(tensors["time"], batch.times.clamp(max=MAX_TIME - 1))  # [S, B, K, width]
        parts = (batch.returns[..., None], batch.observations, batch.actions)
        embedded = [
            _linear(tensors, name, part) + time for name, part in zip(("return", "state", "action"), parts, strict=True)
        ]
        x = torch.stack(embedded, dim=3).view(learners, size, 3 * steps, width)
        valid = batch.valid.repeat_interleave(3, dim=2)[:, :, None, None]  # [S, B, 1, 1, L], as keys
        causal = torch.ones(3 * steps, 3 * steps, dtype=torch.bool, device=x.device).tril()
        # A token always attends to itself, so that padding has a finite softmax; nothing valid reads padding.
        mask = (causal & valid) | torch.eye(3 * steps, dtype=torch.bool, device=x.device)
        drop = _Dropout(self.settings.dropout, noise)
        x = drop(_norm(tensors, "embed_norm", x))
        for index in range(len(self.settings.hidden)):
            name = f"block{index}"
            heads = _linear(tensors, f"{name}.qkv", _norm(tensors, f"{name}.norm1", x))
            heads = heads.view(learners, size, 3 * steps, 3, self.settings.num_heads, -1).permute(3, 0, 1, 4, 2, 5)
            query, key, value = heads.unbind(0)  # [S, B, H, L, d]
            scores = (query @ key.transpose(-2, -1)) / math.sqrt(query.shape[-1])
            attention = drop(torch.softmax(scores.masked_fill(~mask, -torch.inf), dim=-1))
            attended = (attention @ value).transpose(2, 3).flatten(3)
            x = x + drop(_linear(tensors, f"{name}.out", attended))
            inner = torch.relu(_linear(tensors, f"{name}.up", _norm(tensors, f"{name}.norm2", x)))
            x = x + drop(_linear(tensors, f"{name}.down", inner))
        return torch.tanh(_linear(tensors, "head", _norm(tensors, "norm", x)[:, :, 1::3]))

    def act(self, observations: Tensor) -> Tensor:
        """Actions [S, E, A] of the first step of an episode, for observations [S, E, O]."""
        start = observations[:, :, None]
        zeros = torch.zeros(*start.shape[:3], dtype=torch.long, device=start.device)
        returns = self.target()[:, None].expand(zeros.shape)
        actions = start.new_zeros(*start.shape[:3], self.model.tensors["action.weight"].shape[1])
        return self.forward(WindowBatch(start, actions, returns, zeros, zeros == 0))[:, :, -1]

    def make_actor(self, scaling: Scaling) -> Actor:
        """Act with a memory of the last K steps of each environment."""
        return _Memory(self, scaling).act


class _Memory:
    """What a policy remembers of E environments: the window that ends at the current step."""

    def __init__(self, model: DT, scaling: Scaling) -> None:
        self.model = model
        self.scaling = scaling
        self.window: WindowBatch | None = None

    @torch.no_grad()
    def act(self, step: Step) -> FloatArray:
        """Actions [E, A] in the units of the dataset."""
        device, settings = self.scaling.observation_mean.device, self.model.settings
        seen = np.concatenate([step.observations, step.goals], axis=1)[:, : self.scaling.observation_mean.shape[1]]
        observations = self.scaling.observations(torch.from_numpy(seen)[None].to(device))  # [1, E, O]
        first = torch.from_numpy(step.first).to(device)[None]  # [1, E]
        last = self.window
        if last is None or last.returns.shape[1] != len(step.first):
            last = self._empty(len(step.first), observations.shape[-1], device)
            first = torch.ones_like(first)
        received = torch.from_numpy(step.rewards).to(device) / settings.return_scale
        returns = torch.where(first, self.model.target(), last.returns[:, :, -1] - received)
        times = torch.where(first, 0, last.times[:, :, -1] + 1)
        window = WindowBatch(
            _append(last.observations, observations),
            _append(last.actions, torch.zeros_like(last.actions[:, :, 0])),
            _append(last.returns, returns),
            _append(last.times, times),
            _append(last.valid & ~first[..., None], torch.ones_like(first)),
        )
        actions = self.model.forward(window)[:, :, -1]
        window.actions[:, :, -1] = actions
        self.window = window
        found: FloatArray = self.scaling.real_actions(actions)[0].cpu().numpy()
        return found

    def _empty(self, num_envs: int, observation_dim: int, device: torch.device) -> WindowBatch:
        shape = (1, num_envs, self.model.settings.context)
        zeros = torch.zeros(shape, dtype=torch.long, device=device)
        action_dim = self.scaling.action_middle.shape[1]
        return WindowBatch(
            torch.zeros(*shape, observation_dim, device=device),
            torch.zeros(*shape, action_dim, device=device),
            torch.zeros(shape, device=device),
            zeros,
            zeros > 0,
        )


def _append(window: Tensor, newest: Tensor) -> Tensor:
    """Drop the oldest step and append the newest: [1, E, K, ...] and [1, E, ...] -> [1, E, K, ...]."""
    return torch.cat([window[:, :, 1:], newest[:, :, None]], dim=2)


class _Dropout:
    """Zeroes values at random; what it zeroes is a function of the noise of each row and of the number of the call."""

    def __init__(self, probability: float, noise: Tensor | None) -> None:
        self.probability = probability
        self.calls = 0
        # Two uniform numbers of 24 bits are one key. Hashing it here needs no memory for the numbers of all layers.
        self.keys = None if noise is None else _joined(noise)

    def __call__(self, x: Tensor) -> Tensor:
        if self.keys is None:
            return x
        self.calls += 1
        places = torch.arange(1, x[0, 0].numel() + 1, device=x.device).view(x.shape[2:])
        keys = mix(self.keys + signed(self.calls * STEP)).view(*x.shape[:2], *[1] * places.ndim)  # [S, B, 1, ...]
        # Places are hashed too: compiled code would fold a factor of 64 bits into its index and overflow.
        keep = logical_shift(mix(keys + mix(places)), 40) >= self.probability * 2.0**24
        return x * keep / (1.0 - self.probability)


def _joined(noise: Tensor) -> Tensor:
    """Two uniform numbers as one integer of 48 bits: [S, B, 2] -> [S, B]."""
    parts = (noise * 2.0**24).long()
    return parts[..., 0] * 2**24 + parts[..., 1]


def _init(settings: DTSettings, sizes: Sizes, seed: int) -> Tensors:
    """Initial weights of one learner: normal with deviation 0.02, biases 0, norms 1, as in GPT."""
    generator = torch.Generator().manual_seed(stream_seed(seed, _WEIGHTS))
    width = settings.hidden[0]
    linear = {"return": (1, width), "state": (sizes.observation_dim, width), "action": (sizes.action_dim, width)}
    for index in range(len(settings.hidden)):
        linear |= {f"block{index}.qkv": (width, 3 * width), f"block{index}.out": (width, width)}
        linear |= {f"block{index}.up": (width, 4 * width), f"block{index}.down": (4 * width, width)}
    linear["head"] = (width, sizes.action_dim)
    norms = ["embed_norm", "norm", *(f"block{i}.norm{j}" for i in range(len(settings.hidden)) for j in (1, 2))]
    tensors: Tensors = {"time": 0.02 * torch.randn(MAX_TIME, width, generator=generator)}
    for name, shape in linear.items():
        tensors[f"{name}.weight"] = 0.02 * torch.randn(*shape, generator=generator)
        tensors[f"{name}.bias"] = torch.zeros(1, shape[1])
    for name in norms:
        tensors |= {f"{name}.weight": torch.ones(1, width), f"{name}.bias": torch.zeros(1, width)}
    return tensors


def _linear(tensors: Tensors, name: str, x: Tensor) -> Tensor:
    """A linear layer of each learner: [S, ..., in] -> [S, ..., out]."""
    weight, bias = tensors[f"{name}.weight"], tensors[f"{name}.bias"]
    if name.endswith("qkv"):
        # Softmax removes a key bias again: its gradient is rounding error (docs/decisions/0009).
        queries, keys, values = bias.chunk(3, dim=-1)
        bias = torch.cat([queries, keys.detach(), values], dim=-1)
    flat = torch.baddbmm(bias, x.reshape(len(x), -1, x.shape[-1]), weight)
    return flat.view(*x.shape[:-1], weight.shape[-1])


def _norm(tensors: Tensors, name: str, x: Tensor) -> Tensor:
    """A layer norm of each learner: [S, B, L, width] -> the same shape."""
    normal = functional.layer_norm(x, x.shape[-1:], eps=NORM_EPSILON)
    return normal * tensors[f"{name}.weight"][:, None] + tensors[f"{name}.bias"][:, None]


def _rows(table: Tensor, index: Tensor) -> Tensor:
    """Rows of a table of each learner: table [S, T, D], index [S, ...] -> [S, ..., D]."""
    flat = index.reshape(len(index), -1, 1).expand(-1, -1, table.shape[-1])
    return table.gather(1, flat).view(*index.shape, -1)


TARGETS = {"hopper": (3600.0, 1800.0), "halfcheetah": (12000.0, 6000.0), "walker2d": (5000.0, 2500.0)}
"""Target returns of the authors' code, to choose from on tuning seeds."""

PRESETS = {
    "dt": Preset(DT, DTSettings()),
    # Targets of the paper's appendix, and for halfcheetah the larger one of the authors' code as well.
    "dt-hopper": Preset(DT, DTSettings(target_return=3600.0)),
    "dt-halfcheetah": Preset(DT, DTSettings(target_return=6000.0)),
    "dt-halfcheetah-medium-expert": Preset(DT, DTSettings(target_return=12000.0)),
    "dt-walker2d": Preset(DT, DTSettings(target_return=5000.0)),
    "dt-antmaze": Preset(DT, DTSettings(return_scale=1.0)),  # ours: returns are 0 or 1
}
