"""Teacher forcing: predict every token from those before it. A run is a function of data, config and seed."""

import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from trajectory_transformer.checkpoint import read_tensors, write_tensors
from trajectory_transformer.config import TrainConfig
from trajectory_transformer.model.trajectory_model import TrajectoryModel
from trajectory_transformer.tokens.layout import TokenLayout
from trajectory_transformer.tokens.windows import (
    Batch,
    TokenizedDataset,
    batch_indices,
    gather_windows,
    loss_weights,
)
from trajectory_transformer.training.optim import learning_rate, make_optimizer, total_steps, warmup_steps


@dataclass(frozen=True)
class Metrics:
    """What happened since the last report."""

    step: int
    total_steps: int
    loss: float  # mean over the steps reported
    losses: dict[str, float]  # cross-entropy of the last batch by kind of token, unweighted
    learning_rate: float
    gradient_norm: float
    tokens_per_second: float


class Trainer:
    """A run under way: model, optimiser and the step they stand at."""

    def __init__(self, model: TrajectoryModel, data: TokenizedDataset, config: TrainConfig) -> None:
        """Prepare step 0 of a run; the data moves to the model's device."""
        self.model = model
        self.config = config
        self.step = 0
        self.data = data.to(model.device)
        self.total_steps = total_steps(config, data.num_windows)
        self._warmup = warmup_steps(config, data.num_windows)
        self._optimizer = make_optimizer(model.gpt, config)

    def run(self) -> Iterator[Metrics | None]:
        """Train to the end; yields after every step, so that the caller may stop or save: metrics now and then."""
        self.model.gpt.train()
        try:
            yield from self._steps()
        finally:
            self.model.gpt.eval()

    def _steps(self) -> Iterator[Metrics | None]:
        gpt, config = self.model.gpt, self.config
        losses: list[Tensor] = []
        started = time.perf_counter()
        while self.step < self.total_steps:
            batch = self._batch()
            rate = self._prepare_step()
            loss, by_token = weighted_loss(self.model, batch, config.action_weight)
            torch.autograd.backward(loss)
            norm = torch.nn.utils.clip_grad_norm_(gpt.parameters(), config.grad_clip)
            self._optimizer.step()
            self._optimizer.zero_grad(set_to_none=True)
            self.step += 1
            losses.append(loss.detach())
            if self.step % config.log_every and self.step != self.total_steps:
                yield None
                continue
            mean = float(torch.stack(losses).mean())  # waits for the device
            if not np.isfinite(mean):
                raise ValueError(f"the loss is {mean} at step {self.step}: lower train.learning_rate")
            tokens = len(losses) * batch.tokens.numel()
            yield Metrics(
                step=self.step,
                total_steps=self.total_steps,
                loss=mean,
                losses=losses_by_kind(by_token.detach(), batch, self.model.layout),
                learning_rate=rate,
                gradient_norm=float(norm),
                tokens_per_second=tokens / (time.perf_counter() - started),
            )
            losses.clear()
            started = time.perf_counter()

    def _batch(self) -> Batch:
        config = self.config
        index = batch_indices(self.data.num_windows, config.batch_size, seed=config.seed, step=self.step)
        window = self.model.gpt.config.window
        return gather_windows(self.data, index.to(self.model.device), window, self.model.layout, self.model.tokens)

    def _prepare_step(self) -> float:
        """Set the rate and the dropout of this step, each a function of seed and step alone."""
        rate = learning_rate(
            self.step,
            peak=self.config.learning_rate,
            warmup=self._warmup,
            total=self.total_steps,
            final_share=self.config.final_lr_share,
        )
        for group in self._optimizer.param_groups:
            group["lr"] = rate
        # Dropout draws from torch's global generator, the one place where randomness cannot be an argument.
        torch.manual_seed(int(np.random.SeedSequence([self.config.seed, self.step]).generate_state(1)[0]))
        return rate

    def save(self, path: Path) -> None:
        """Write all that is needed to go on: weights, moments and step, in one file."""
        tensors = {f"weights.{name}": value for name, value in self.model.gpt.state_dict().items()}
        for name, parameter in self.model.gpt.named_parameters():
            for moment, value in self._optimizer.state[parameter].items():
                tensors[f"{moment}.{name}"] = value
        write_tensors(path, tensors, {"step": str(self.step)})

    def load(self, path: Path) -> None:
        """Go on from a file of `save`."""
        tensors, metadata = read_tensors(path)
        weights = {
            name.removeprefix("weights."): value for name, value in tensors.items() if name.startswith("weights.")
        }
        try:
            self.model.gpt.load_state_dict(weights)
        except RuntimeError as error:
            raise ValueError(f"{path}: not the state of this model ({str(error).splitlines()[-1].strip()})") from error
        for name, parameter in self.model.gpt.named_parameters():
            for moment in ("step", "exp_avg", "exp_avg_sq"):
                if f"{moment}.{name}" in tensors:
                    device = parameter.device
                    self._optimizer.state[parameter][moment] = tensors[f"{moment}.{name}"].to(device)
        self.step = int(metadata["step"])


def weighted_loss(model: TrajectoryModel, batch: Batch, action_weight: float) -> tuple[Tensor, Tensor]:
    """Mean weighted cross-entropy of a batch, and each prediction's own [B, L']; weightless ones count in the mean."""
    logits = model.gpt(batch.tokens[:, :-1])
    num_predicted = logits.shape[1]
    targets = batch.tokens[:, -num_predicted:]
    weights = loss_weights(batch, model.layout, model.tokens, action_weight)[:, -num_predicted:]
    by_token = functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none").view_as(weights)
    return (by_token * weights).mean(), by_token


def losses_by_kind(by_token: Tensor, batch: Batch, layout: TokenLayout) -> dict[str, float]:
    """Mean cross-entropy of the real observation, action, reward and value tokens: by_token [B, L']."""
    num_predicted = by_token.shape[1]
    total = batch.tokens.shape[1]
    slots = torch.tensor([layout.slot(position) for position in range(total - num_predicted, total)])
    real = batch.real[:, -num_predicted:]
    kinds = {
        "observation": slots < layout.observation_dim,
        "action": (slots >= layout.action.start) & (slots < layout.action.stop),
    }
    if layout.rewards:
        kinds |= {"reward": slots == layout.reward, "value": slots == layout.value}
    means = {}
    for kind, chosen in kinds.items():
        counted = real & chosen.to(real.device)
        means[kind] = float((by_token * counted).sum() / counted.sum().clamp(min=1))
    return means
