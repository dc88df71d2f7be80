"""A small convolutional network that turns the map of an episode into one embedding."""

import torch
from torch import Tensor, nn
from torch.nn import functional


class MapEncoder(nn.Module):
    """Encodes an image-like array. The result is added to every token, like a position embedding.

    Positions matter as much as contents, so there is no pooling: two strided convolutions, each followed by a residual
    block, then an MLP over everything that is left.
    """

    def __init__(self, shape: tuple[int, ...], channels: int, width: int) -> None:
        """Read arrays of shape [C, H, W] with `channels` at full resolution and twice as many below."""
        super().__init__()
        assert channels >= 1, "an encoder needs channels"
        num_planes, height, breadth = shape
        self.stem = nn.Conv2d(num_planes, channels, 3, padding=1)
        self.halve1 = nn.Conv2d(channels, 2 * channels, 3, stride=2, padding=1)
        self.block1 = _Residual(2 * channels)
        self.halve2 = nn.Conv2d(2 * channels, 2 * channels, 3, stride=2, padding=1)
        self.block2 = _Residual(2 * channels)
        places = -(-height // 4) * -(-breadth // 4)
        self.gather = nn.Linear(2 * channels * places, 4 * width)
        self.out = nn.Linear(4 * width, width)
        self.apply(_initialize)
        # The same scale as the token embeddings that it is added to.
        nn.init.normal_(self.out.weight, std=0.02)

    def forward(self, maps: Tensor) -> Tensor:
        """Maps with values around 1 to embeddings: [B, C, H, W] -> [B, width]."""
        x = maps.to(self.stem.weight.dtype)
        if x.device.type != "cpu":  # the memory format of accelerators; otherwise every layer would transpose
            x = x.contiguous(memory_format=torch.channels_last)
        x = functional.gelu(self.stem(x))
        x = self.block1(functional.gelu(self.halve1(x)))
        x = self.block2(functional.gelu(self.halve2(x)))
        encoded: Tensor = self.out(functional.gelu(self.gather(x.flatten(1))))
        return encoded


class _Residual(nn.Module):
    """Two convolutions around a residual connection."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(channels, channels, 3, padding=1)
        self.second = nn.Conv2d(channels, channels, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        """[B, C, H, W] -> the same."""
        return torch.add(x, self.second(functional.gelu(self.first(x))))


def _initialize(module: nn.Module) -> None:
    """He initialisation, which keeps the variance of activations; torch's default shrinks it in every layer."""
    if isinstance(module, nn.Conv2d | nn.Linear):
        nn.init.kaiming_normal_(module.weight, nonlinearity="relu")
        assert module.bias is not None
        nn.init.zeros_(module.bias)
    if isinstance(module, _Residual):
        nn.init.zeros_(module.second.weight)
