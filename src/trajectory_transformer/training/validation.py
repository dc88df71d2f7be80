"""Losses on held-out episodes while a model is trained, the best weights so far, and when to stop."""

from collections.abc import Mapping

import torch
from torch import Tensor

from trajectory_transformer.config import TrainConfig, require
from trajectory_transformer.model.trajectory_model import TrajectoryModel
from trajectory_transformer.tokens.windows import Batch, TokenizedDataset, gather_windows
from trajectory_transformer.training.loss import token_kinds, totals_by_kind, weighted_loss
from trajectory_transformer.training.parallel import World

MAX_WINDOWS = 2048
"""Held-out windows that are measured, evenly spaced, at most."""
_PER_RUN = 50  # validations of a run, at most
_STEPS_PER_BATCH = 5  # training steps for each validated batch, at least: validation then takes a few percent of a run
_BEST = "best."


class Validation:
    """Held-out windows, and the weights with the smallest loss on them."""

    def __init__(
        self, model: TrajectoryModel, data: TokenizedDataset, config: TrainConfig, world: World | None = None
    ) -> None:
        """Validate a model on held-out data, in one process or as one of several."""
        require(data.num_windows >= 1, "the held-out episodes need at least one window", data.num_windows)
        self._model = model
        self._data = data
        self._config = config
        self._world = world or World()
        self._count = min(MAX_WINDOWS, data.num_windows)
        self.best_loss = float("inf")
        self.best_step = 0
        self.since_best = 0  # validations without a smaller loss
        self._best_weights: dict[str, Tensor] = {}

    def interval(self, total_steps: int, log_every: int) -> int:
        """Steps between two validations, a multiple of those between two reports."""
        batches = -(-self._count // self._config.batch_size)
        return max(-(-max(total_steps // _PER_RUN, _STEPS_PER_BATCH * batches) // log_every), 1) * log_every

    @property
    def has_stalled(self) -> bool:
        """Whether the loss has not fallen for as long as `train.patience` allows."""
        return self._config.patience is not None and self.since_best >= self._config.patience

    @torch.no_grad()
    def measure(self, step: int) -> tuple[float, dict[str, float]]:
        """The loss as in training, and by kind of token; keeps the weights if the loss is the smallest so far."""
        # One process measures for all: they must agree on the best step and on when to stop.
        found = torch.zeros(1 + len(token_kinds(self._model.layout)), dtype=torch.float64, device=self._model.device)
        if self._world.leads:
            self._model.gpt.eval()
            found = self._losses()
            self._model.gpt.train()
        loss, *by_kind = self._world.add_up(found).tolist()
        self.since_best += 1
        if loss < self.best_loss:
            self.best_loss, self.best_step, self.since_best = loss, step, 0
            self._best_weights = {name: value.clone() for name, value in self._model.gpt.state_dict().items()}
        return loss, dict(zip(token_kinds(self._model.layout), by_kind, strict=True))

    def _losses(self) -> Tensor:
        """The weighted loss and that of each kind of token [1 + kinds], in float64."""
        device, size = self._model.device, self._config.batch_size
        chosen = torch.arange(self._count, device=self._data.rows.device) * self._data.num_windows // self._count
        weighted: list[Tensor] = []  # [2] of every batch: sum over all predictions, and their number
        kinds: list[Tensor] = []  # [2, kinds] of every batch
        for index in torch.split(chosen, size):
            gathered = gather_windows(self._data, index, self._model.gpt.config.window, self._model.tokenizer)
            maps = None if gathered.maps is None else gathered.maps.to(device)
            batch = Batch(gathered.tokens.to(device), gathered.real.to(device), maps)
            loss, by_token = weighted_loss(self._model, batch, self._config.action_weight)
            count = loss.new_tensor(by_token.numel(), dtype=torch.float64)
            weighted.append(torch.stack([loss.double() * count, count]))
            kinds.append(totals_by_kind(by_token, batch, self._model.layout).double())
        sums, counts = torch.cat([torch.stack(weighted).sum(dim=0)[:, None], torch.stack(kinds).sum(dim=0)], dim=1)
        return torch.div(sums, counts.clamp(min=1))

    def best_model(self) -> TrajectoryModel | None:
        """A copy of the model with the best weights, on the CPU; None before the first validation."""
        if not self._best_weights:
            return None
        copy = TrajectoryModel.build(self._model.tokenizer, self._model.gpt.config, self._model.metadata, seed=0)
        copy.gpt.load_state_dict(self._best_weights)
        return copy

    def state(self) -> tuple[dict[str, Tensor], dict[str, str]]:
        """The best weights by name, and the rest as text, to resume from."""
        tensors = {_BEST + name: value for name, value in self._best_weights.items()}
        rest = {"best_loss": self.best_loss.hex(), "best_step": str(self.best_step), "since_best": str(self.since_best)}
        return tensors, rest

    def load_state(self, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> None:
        """Restore `state`."""
        device = self._model.device
        self._best_weights = {
            name.removeprefix(_BEST): value.to(device) for name, value in tensors.items() if name.startswith(_BEST)
        }
        self.best_loss = float.fromhex(metadata["best_loss"])
        self.best_step, self.since_best = int(metadata["best_step"]), int(metadata["since_best"])
