"""The training loss: weighted cross-entropy of every token given those before it."""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional

from trajectory_transformer.model.trajectory_model import TrajectoryModel
from trajectory_transformer.tokens.layout import TokenLayout
from trajectory_transformer.tokens.windows import Batch, loss_weights


def weighted_loss(model: TrajectoryModel, batch: Batch, action_weight: float) -> tuple[Tensor, Tensor]:
    """Mean weighted cross-entropy of a batch, and that of each prediction [B, L'], unweighted.

    The mean is over all predictions, those with weight 0 included.
    """
    logits = model.gpt(batch.tokens[:, :-1], model.gpt.encode_map(batch.maps))
    num_predicted = logits.shape[1]
    targets = batch.tokens[:, -num_predicted:]
    weights = loss_weights(batch, model.tokenizer, action_weight)[:, -num_predicted:]
    by_token = functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none").view_as(weights)
    return (by_token * weights).mean(), by_token


def token_kinds(layout: TokenLayout) -> tuple[str, ...]:
    """Kinds of tokens that are predicted."""
    return ("observation", "action", "reward", "value") if layout.rewards else ("observation", "action")


def losses_by_kind(
    by_token: Tensor, batch: Batch, layout: TokenLayout, add_up: Callable[[Tensor], Tensor] = lambda totals: totals
) -> dict[str, float]:
    """Mean cross-entropy of the real observation, action, reward and value tokens: by_token [B, L'].

    `add_up` sums the totals [2, kinds] over all processes, each of which has its share of the batch.
    """
    sums, counts = add_up(totals_by_kind(by_token, batch, layout))
    return dict(zip(token_kinds(layout), (sums / counts.clamp(min=1)).tolist(), strict=True))


def totals_by_kind(by_token: Tensor, batch: Batch, layout: TokenLayout) -> Tensor:
    """Sum of the cross-entropy of the real tokens of each kind, and their number: by_token [B, L'] -> [2, kinds]."""
    num_predicted = by_token.shape[1]
    total = batch.tokens.shape[1]
    slots = torch.tensor([layout.slot(position) for position in range(total - num_predicted, total)])
    real = batch.real[:, -num_predicted:]
    kinds = [slots < layout.observation_dim, (slots >= layout.action.start) & (slots < layout.action.stop)]
    if layout.rewards:
        kinds += [slots == layout.reward, slots == layout.value]
    counted = [real & chosen.to(real.device) for chosen in kinds]
    sums = torch.stack([(by_token * chosen).sum() for chosen in counted])
    counts = torch.stack([chosen.sum() for chosen in counted])
    return torch.stack([sums, counts.to(sums.dtype)])
