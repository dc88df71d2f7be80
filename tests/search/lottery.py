"""A task on which sampled reward tokens mislead the search: a safe action worth 11, a lottery worth 6 on average."""

from functools import cache

import numpy as np
import torch

from trajectory_transformer.config import ModelConfig, Sampler, SearchConfig, TokenConfig, TrainConfig
from trajectory_transformer.data.episode import Dataset, Dimension, Episode
from trajectory_transformer.model.trajectory_model import TrajectoryModel
from trajectory_transformer.runs import train
from trajectory_transformer.search.beam import beam_search
from trajectory_transformer.search.decoder import Bins, Decoder
from trajectory_transformer.search.noise import Noise
from trajectory_transformer.search.objectives import discounted_return

SAFE, LOTTERY = 0, 1


def _episode(action: int, rewards: tuple[float, float]) -> Episode:
    actions = np.array([[action], [SAFE]], np.float32)
    return Episode(np.arange(3, dtype=np.float32)[:, None], actions, np.array(rewards, np.float32), terminated=True)


@cache
def lottery_model() -> TrajectoryModel:
    """A model of the task. One draw in ten earns 2 and then 22, the others 0 and then 4: 6 on average."""
    safe, lost, won = _episode(SAFE, (1.0, 10.0)), _episode(LOTTERY, (0.0, 4.0)), _episode(LOTTERY, (2.0, 22.0))
    episodes = 10 * [safe] + 9 * [lost] + [won]
    dataset = Dataset(tuple(episodes), {}, (), (Dimension("action", 2),))
    sizes = ModelConfig(window=2, num_layers=1, num_heads=2, width=32, dropout=0.0)
    settings = TrainConfig(steps=300, batch_size=40, learning_rate=1e-2)
    return train(
        dataset,
        tokens=TokenConfig(num_bins=12, discount=1.0, truncated="stop"),
        model=sizes,
        train=settings,
        device="cpu",
    )


def first_choice(decoder: Decoder, reward: Sampler) -> tuple[int, float]:
    """The first action of a wide search, and its score."""
    model = lottery_model()
    config = SearchConfig(beam_width=32, expansion=2, horizon=1, action=Sampler(top_k=20), reward=reward)
    prompt = torch.from_numpy(model.tokenizer.encode_states(np.zeros((1, 1), np.float32)))
    bins, noise = Bins(model.layout, model.bin_values()), Noise(torch.tensor([3]))
    plan = beam_search(decoder, prompt, discounted_return(1.0), bins=bins, config=config, noise=noise)
    return int(plan.best[0, 0]), float(plan.scores[0, 0])
