"""Augmentation of agents on grids: transformed windows still follow the rules of their transformed maps."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Literal

import numpy as np
import pytest
import torch

from trajectory_transformer.actors import parse_actor
from trajectory_transformer.collect import WorkerPool, play_parts, split_by_share
from trajectory_transformer.config import ModelConfig, TokenConfig, TrainConfig
from trajectory_transformer.data.episode import Dataset, Dimension
from trajectory_transformer.gpu.backends import make_batch_maker, make_engine
from trajectory_transformer.gpu.training import captured
from trajectory_transformer.model.trajectory_model import TrajectoryModel
from trajectory_transformer.tokens.windows import Batch, gather_windows, tokenize
from trajectory_transformer.training.augment import grid_augment
from trajectory_transformer.training.parallel import World
from trajectory_transformer.training.train import Trainer, batch_maker

SIZE, WINDOW = 11, 14
AHEAD = [(1, 0), (0, 1), (-1, 0), (0, -1)]  # x, y of each direction


@pytest.fixture(scope="module")
def dataset() -> Dataset:
    """Episodes of an expert and of a random policy on small maps."""
    actors = [parse_actor("expert eps=0.3"), parse_actor("random")]
    with WorkerPool(1) as pool:
        options = {"width": SIZE, "height": SIZE, "maxRoomSize": 5, "max_steps": WINDOW - 1}
        parts = split_by_share(actors, steps=None, episodes=40)
        played = list(play_parts("MiniGrid-MultiRoom-N2-S4-v0", parts, seed=0, pool=pool, env_options=options))
    observed = map(Dimension, ("x", "y", "direction"), (SIZE, SIZE, 4))
    return Dataset(tuple(each.episode for each in played), {}, tuple(observed), (Dimension("action", 7),))


def make_model(dataset: Dataset, **changes: int) -> TrajectoryModel:
    tokens = TokenConfig(**{"num_bins": SIZE, "goal_dims": (0, 1), "rewards": False, **changes})  # type: ignore[arg-type]
    return TrajectoryModel.create(dataset, tokens, ModelConfig(window=WINDOW, num_layers=1, width=16), seed=0)


def whole_episodes(model: TrajectoryModel, dataset: Dataset) -> Batch:
    """The window from the first step of every episode, which holds the whole episode."""
    data = tokenize(dataset, model.tokenizer)
    return gather_windows(data, data.end_window - data.num_steps, WINDOW, model.tokenizer)


def replay(walls: np.ndarray, doors: np.ndarray, start: list[int], actions: list[int]) -> Iterator[list[int]]:
    """States after each action by the rules of MiniGrid, implemented independently of it."""
    x, y, facing = start
    opened: set[tuple[int, int]] = set()
    for action in actions:
        ahead = (x + AHEAD[facing][0], y + AHEAD[facing][1])
        if action < 2:
            facing = (facing + (-1 if action == 0 else 1)) % 4
        elif action == 2 and not walls[ahead[1], ahead[0]] and (not doors[ahead[1], ahead[0]] or ahead in opened):
            x, y = ahead
        elif action == 5 and doors[ahead[1], ahead[0]]:
            opened ^= {ahead}
        yield [x, y, facing]


def follows_its_own_map(tokens: torch.Tensor, map: torch.Tensor, stop: int) -> bool:
    """Whether the states of a window [L] follow from its actions on its map, and end at its goal."""
    rows = [row for row in tokens[2:].view(-1, 4).tolist() if row[0] != stop]
    walls, doors = map.numpy()
    states = [row[:3] for row in rows]
    actions = [row[3] for row in rows[:-1]]
    return list(replay(walls, doors, states[0], actions)) == states[1:] and states[-1][:2] == tokens[:2].tolist()


def test_recorded_windows_follow_their_maps(dataset: Dataset) -> None:
    batch = whole_episodes(make_model(dataset), dataset)
    assert batch.maps is not None
    for tokens, map in zip(batch.tokens, batch.maps, strict=True):
        assert follows_its_own_map(tokens, map, SIZE)


def test_augmented_windows_follow_their_augmented_maps(dataset: Dataset) -> None:
    model = make_model(dataset)
    batch = whole_episodes(model, dataset)
    assert batch.maps is not None
    augment = grid_augment(model)
    seen = set()
    for seed in range(20):
        uniform = torch.rand(len(batch.tokens), 4, generator=torch.Generator().manual_seed(seed))
        other = augment(batch, uniform)
        assert other.maps is not None
        assert torch.equal(other.real, batch.real)
        assert torch.equal(other.tokens == SIZE, batch.tokens == SIZE), "stop tokens are unchanged"
        assert torch.equal(other.maps.sum(dim=(2, 3)), batch.maps.sum(dim=(2, 3))), "no cell is lost"
        for tokens, map in zip(other.tokens, other.maps, strict=True):
            assert follows_its_own_map(tokens, map, SIZE)
        seen.add(other.maps[0].numpy().tobytes())
    assert len(seen) > 15, "nearly all augmentations of a map differ"


def test_the_identity_is_one_of_the_augmentations(dataset: Dataset) -> None:
    model = make_model(dataset)
    batch = whole_episodes(model, dataset)
    assert batch.maps is not None
    filled = (batch.maps > 0).any(dim=1)
    corners = []
    for axis in (1, 2):  # of columns, then of rows
        line = filled.any(dim=axis)
        first, last = line.long().argmax(dim=1), SIZE - 1 - line.long().flip(1).argmax(dim=1)
        corners.append((first + 0.5) / (first + SIZE - last))  # the shift that was recorded
    uniform = torch.stack([torch.zeros(len(filled)), torch.ones(len(filled)), *corners], dim=1)
    same = grid_augment(model)(batch, uniform)
    assert same.maps is not None
    assert torch.equal(same.tokens, batch.tokens)
    assert torch.equal(same.maps, batch.maps)


def test_augmented_batches_depend_on_seed_and_step_only(dataset: Dataset) -> None:
    model = make_model(dataset)
    data = tokenize(dataset, model.tokenizer)

    def tokens_of(config: TrainConfig, *, seed: int = 0, step: int = 2) -> torch.Tensor:
        trainer = Trainer(model, data, config, seed=seed)
        trainer.step = step
        return batch_maker(model, data, config)(*trainer.draw()).tokens

    config = TrainConfig(steps=3, batch_size=8, augment="grid")
    tokens = tokens_of(config)
    assert torch.equal(tokens_of(config), tokens)
    for other in (tokens_of(config, seed=1), tokens_of(config, step=1), tokens_of(replace(config, augment="none"))):
        assert not torch.equal(other, tokens)


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore:TensorFloat32 tensor cores:UserWarning")
def test_augmented_batches_are_the_same_on_a_gpu(dataset: Dataset, monkeypatch: pytest.MonkeyPatch) -> None:
    def losses_of(backend: Literal["auto", "eager", "compiled"]) -> list[float]:
        model = make_model(dataset)
        data = tokenize(dataset, model.tokenizer).to(torch.device("cuda"))
        model.gpt.to("cuda")
        config = TrainConfig(steps=9, batch_size=8, warmup_steps=2, learning_rate=6e-4, augment="grid", backend=backend)
        engine, make_batch = make_engine(model, config, World()), make_batch_maker(model, data, config)
        trainer = Trainer(model, data, config, engine=engine, make_batch=make_batch, log_every=1)
        return [metrics.loss for metrics in trainer.run() if metrics]

    # The model is too small for the fused backend. The compiler times its kernels and may choose others the next time.
    assert losses_of("auto") == pytest.approx(losses_of("auto"), rel=1e-3)
    eager = losses_of("eager")
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)
    monkeypatch.setattr(captured, "supports_bf16", lambda: False)
    assert losses_of("compiled") == pytest.approx(eager, rel=1e-5), "captured as a CUDA graph"


def test_layouts_other_than_agents_on_a_grid_are_refused(dataset: Dataset, tiny_model: TrajectoryModel) -> None:
    with pytest.raises(ValueError, match="train.augment grid needs a goal of x and y"):
        grid_augment(tiny_model)
    with pytest.raises(
        ValueError, match="train.augment grid needs a token for each of 11 cells: raise tokens.num_bins"
    ):
        grid_augment(make_model(dataset, num_bins=8))
