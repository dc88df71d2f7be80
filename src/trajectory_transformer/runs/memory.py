"""How much memory training needs, and how much there is: a run that cannot fit is refused before it starts."""

import torch

from trajectory_transformer.config import TrainConfig
from trajectory_transformer.limits import GIB, available_bytes
from trajectory_transformer.model.gpt import GPT

_FLOAT = 4  # bytes

# Float32 numbers kept for the backward pass, measured as peak memory of the eager backend on a CPU: windows of 159 and
# 719 tokens, widths 64 to 256, batches of 32 to 256. The measured peaks lie between 0.93 and 1.13 of the estimate.
_PER_HIDDEN = 22  # for each entry of a token's hidden state, in each layer
_PER_PAIR = 3.2  # for each pair of tokens and each head, in each layer; only with dropout, which needs the whole matrix
_PER_LOGIT = 5


def training_bytes(gpt: GPT, config: TrainConfig) -> int:
    """Memory that the eager backend needs for one step: weights, gradients, optimizer and activations."""
    model, layout = gpt.config, gpt.layout
    tokens = layout.length(model.window) - 1
    parameters = sum(parameter.numel() for parameter in gpt.parameters())
    hidden = _PER_HIDDEN * tokens * model.width * model.num_layers
    pairs = _PER_PAIR * tokens**2 * model.num_heads * model.num_layers if model.dropout else 0
    logits = _PER_LOGIT * tokens * (gpt.num_bins + 1)
    return int(_FLOAT * (4 * parameters + config.batch_size * (hidden + pairs + logits)))


def check_memory(gpt: GPT, config: TrainConfig, device: torch.device) -> None:
    """Refuse a run that needs more memory than there is. On a GPU the need depends on the backend and is not known."""
    needed, available = training_bytes(gpt, config), available_bytes()
    if device.type != "cpu" or available is None or needed <= available:
        return
    tokens = gpt.layout.length(gpt.config.window)
    raise ValueError(
        f"training needs about {needed / GIB:.1f} GiB of memory and {available / GIB:.1f} GiB are available: a batch "
        f"has {config.batch_size} windows of {gpt.config.window} transitions, {tokens:,} tokens each; lower "
        "--train.batch_size, --model.window or the number of dimensions"
    )
