"""The readable oracle: a full forward pass over everything visible, for every token of every candidate."""

import torch
from torch import Tensor

from trajectory_transformer.search.decoder import StepwiseDecoder


class NaiveDecoder(StepwiseDecoder):
    """Extends candidates without remembering anything but their tokens."""

    @torch.no_grad()
    def logits(self) -> Tensor:
        """Logits of every candidate's next token [E, K, V + 1]."""
        prompt, own = self.visible(self.num_cropped())
        shared = prompt[:, None].expand(-1, own.shape[1], -1)
        rows = torch.cat([shared, own], dim=2).flatten(0, 1)
        map_embedding = (
            None if self.map_embedding is None else self.map_embedding.repeat_interleave(own.shape[1], dim=0)
        )
        last: Tensor = self.gpt(rows, map_embedding)[:, -1]
        return last.view(*own.shape[:2], -1)
