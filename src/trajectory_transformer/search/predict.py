"""Open-loop prediction: roll the model forward from a recorded prefix, under given or its own actions."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from trajectory_transformer.data.episode import DoubleArray, Episode
from trajectory_transformer.model.trajectory_model import TrajectoryModel
from trajectory_transformer.search.cached import CachedDecoder
from trajectory_transformer.search.decoder import Run
from trajectory_transformer.search.sampling import Noise, Sampler, stream_seed
from trajectory_transformer.tokens.windows import encode_goals, encode_transitions


@dataclass(frozen=True)
class Prediction:
    """N sampled futures in real units, NaN after a predicted end."""

    observations: DoubleArray  # [N, H, O], the states after each action
    actions: DoubleArray  # [N, H, A]


@torch.inference_mode()
def predict(
    model: TrajectoryModel,
    episode: Episode,
    *,
    start: int,
    horizon: int,
    num_samples: int,
    seed: int,
    context: int = 4,
    given_actions: bool = True,
    temperature: float = 1.0,
) -> Prediction:
    """Sample futures of an episode from the state at `start` on, after up to `context` recorded transitions.

    With `given_actions` the recorded actions are taken (as many steps as were recorded at most), else sampled ones.
    """
    steps = len(episode)
    if not 0 <= start < steps:
        raise ValueError(f"the first step to predict from must lie in [0, {steps}), got {start}")
    if horizon < 1 or num_samples < 1:
        raise ValueError(f"horizon and samples must be at least 1, got {horizon} and {num_samples}")
    if given_actions and start + horizon > steps:
        raise ValueError(
            f"the episode has {steps - start} recorded actions from step {start} on, got a horizon of {horizon}"
        )
    layout, device = model.layout, model.device
    window = model.gpt.config.window
    first = max(start - min(context, window - 1), 0)
    rows = encode_transitions(episode, model.discretizer, layout, model.tokens)
    goal = encode_goals(episode.observations[-1:, list(model.tokens.goal_dims)], model.discretizer, model.tokens)[0]
    past = rows[first : start + 1].flatten()[: (start - first) * layout.size + layout.observation_dim]
    prompt = torch.from_numpy(np.concatenate([goal, past]))[None].to(device)

    decoder = CachedDecoder(model.gpt)
    noise = Noise(torch.tensor([stream_seed(seed, start)], device=device))
    sampler = Sampler(temperature)
    vocabulary = model.discretizer.num_bins + 1
    encoded = model.encode_maps(episode.map)
    decoder.begin(prompt, max_candidates=num_samples, max_new=horizon * layout.size, map_embedding=encoded)
    decoder.select(torch.zeros(1, num_samples, dtype=torch.long, device=device))

    def sample(num_slots: int, *, allow_stop: bool = True) -> None:
        decoder.extend(Run(num_slots, sampler, noise.gumbel(num_samples, num_slots, vocabulary), allow_stop=allow_stop))

    for step in range(horizon):
        if given_actions:
            for token in rows[start + step, layout.action].tolist():
                decoder.append(torch.full((1, num_samples), token, device=device))
        else:
            sample(layout.action_dim, allow_stop=step > 0)
        sample(layout.size - layout.action_dim)
    planned = decoder.candidates.tokens[0].cpu().numpy().reshape(num_samples, horizon, layout.size)  # a.. [r v] s..
    return Prediction(
        observations=model.discretizer.decode(planned[..., layout.size - layout.observation_dim :], layout.observation),
        actions=model.discretizer.decode(planned[..., : layout.action_dim], layout.action),
    )


def recorded(episode: Episode, start: int, horizon: int) -> npt.NDArray[np.float32]:
    """What really followed: the states after the step `start` [H', O], as many as were recorded."""
    return episode.observations[start + 1 : start + 1 + horizon]
