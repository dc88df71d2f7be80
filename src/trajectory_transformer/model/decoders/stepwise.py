"""The tokens that both decoders keep, and the sliding crop of what the model may see."""

import torch
from torch import Tensor

from trajectory_transformer.model.gpt import GPT


class Sequences:
    """Prompts and candidates of a search, and which part of them is visible.

    A pass may hold `window` transitions at most. When a candidate has that many whole ones and begins another, the
    oldest slides out and positions restart; the goal stays in front.
    """

    def __init__(self, gpt: GPT, window: int | None) -> None:
        """Keep the model and the crop."""
        self.gpt = gpt
        self.window = gpt.config.window if window is None else window
        if self.window > gpt.config.window:
            raise ValueError(
                f"search.window must not exceed the {gpt.config.window} transitions the model was trained on, "
                f"got {self.window}"
            )
        self.prompt = torch.empty(0, 0, dtype=torch.long)
        self.tokens = torch.empty(0, 0, 0, dtype=torch.long)

    def begin(self, prompt: Tensor) -> None:
        """Start with one candidate per environment and nothing added: prompt [E, L]."""
        self.prompt = prompt
        self.tokens = prompt.new_empty(prompt.shape[0], 1, 0)

    def append(self, tokens: Tensor) -> None:
        """Add one token to every candidate: tokens [E, K]."""
        self.tokens = torch.cat([self.tokens, tokens[:, :, None]], dim=2)

    def select(self, parents: Tensor) -> None:
        """Replace the candidates by copies of themselves: parents [E, K']."""
        envs = torch.arange(parents.shape[0], device=parents.device)[:, None]
        self.tokens = self.tokens[envs, parents]

    def num_cropped(self) -> int:
        """Tokens after the goal that have slid out, counted over prompt and candidate; whole transitions."""
        layout = self.gpt.layout
        after_goal = self.prompt.shape[1] + self.tokens.shape[2] - layout.goal_dim
        return max(after_goal // layout.size - (self.window - 1), 0) * layout.size

    def visible(self, cropped: int) -> tuple[Tensor, Tensor]:
        """What is left of prompts [E, L'] and candidates [E, K, n'] after `cropped` tokens behind the goal are gone."""
        goal = self.gpt.layout.goal_dim
        in_prompt = min(cropped, self.prompt.shape[1] - goal)
        prompt = torch.cat([self.prompt[:, :goal], self.prompt[:, goal + in_prompt :]], dim=1)
        return prompt, self.tokens[:, :, cropped - in_prompt :]
