"""Open-loop prediction: roll the model forward from a recorded prefix, with recorded actions or its own."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from trajectory_transformer.config import Sampler
from trajectory_transformer.data.episode import DoubleArray, Episode
from trajectory_transformer.model.trajectory_model import TrajectoryModel
from trajectory_transformer.randomness import stream_seed
from trajectory_transformer.search.cached import CachedDecoder
from trajectory_transformer.search.decoder import Run, StepwiseDecoder
from trajectory_transformer.search.noise import Noise


@dataclass(frozen=True)
class Prediction:
    """N sampled futures in real units, NaN for stop tokens: where the end of the episode is predicted."""

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
    seed: int = 0,
    context: int = 4,
    given_actions: bool = True,
    temperature: float = 1.0,
) -> Prediction:
    """Sample futures of an episode from the state at step `start`, after up to `context` recorded transitions.

    With `given_actions` the recorded actions are taken (at most as many as were recorded), else sampled ones.
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
    tokenizer, layout, device = model.tokenizer, model.layout, model.device
    first = max(start - min(context, model.gpt.config.window - 1), 0)
    rows = tokenizer.encode(episode)
    state = rows[start, layout.observation]
    prompt = torch.from_numpy(tokenizer.prompt(tokenizer.goals_of([episode])[0], list(rows[first:start]), state))

    given = rows[None, start : start + horizon, layout.action] if given_actions else None
    planned = sample_futures(
        CachedDecoder(model.gpt),
        prompt[None].to(device),
        horizon=horizon,
        num_samples=num_samples,
        seeds=torch.tensor([stream_seed(seed, start)], device=device),
        actions=None if given is None else torch.from_numpy(given).to(device),
        temperature=temperature,
        map_embedding=model.encode_maps(episode.map),
    )[0]
    planned_tokens = planned.cpu().numpy()  # [N, H * D]
    decoded = tokenizer.decode(np.broadcast_to(state, (num_samples, len(state))), planned_tokens)
    return Prediction(observations=decoded.states[:, 1:], actions=decoded.actions)


def sample_futures(
    decoder: StepwiseDecoder,
    prompt: Tensor,
    *,
    horizon: int,
    num_samples: int,
    seeds: Tensor,
    actions: Tensor | None = None,
    temperature: float = 1.0,
    map_embedding: Tensor | None = None,
) -> Tensor:
    """Sample N continuations of H transitions for each of E prompts: prompt [E, L], seeds [E] -> tokens [E, N, H * D].

    A prompt ends with a state, and so do the continuations. `actions` [E, H, A] are tokens that all samples of a prompt
    take; without them actions are sampled.
    """
    gpt, layout = decoder.gpt, decoder.gpt.layout
    noise, sampler = Noise(seeds), Sampler(temperature=temperature)
    decoder.begin(prompt, max_candidates=num_samples, max_new=horizon * layout.size, map_embedding=map_embedding)
    decoder.select(torch.zeros(len(prompt), num_samples, dtype=torch.long, device=prompt.device))

    def sample(num_slots: int, *, allow_stop: bool = True) -> None:
        gumbel = noise.gumbel(num_samples, num_slots, gpt.num_bins + 1)
        decoder.extend(Run(num_slots, sampler, gumbel, allow_stop=allow_stop))

    for step in range(horizon):
        if actions is None:
            sample(layout.action_dim, allow_stop=step > 0)
        else:
            for token in actions[:, step].unbind(dim=1):  # [E]
                decoder.append(token[:, None].expand(-1, num_samples).contiguous())
        sample(layout.size - layout.action_dim)
    return decoder.candidates.tokens


def recorded(episode: Episode, start: int, horizon: int) -> npt.NDArray[np.float32]:
    """The recorded states after step `start` [H', O], at most `horizon`."""
    return episode.observations[start + 1 : start + 1 + horizon]
