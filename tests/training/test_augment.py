from collections.abc import Iterator

import numpy as np
import pytest
import torch

from trajectory_transformer.actors import parse_actor
from trajectory_transformer.collect import WorkerPool, play_parts, split_by_share
from trajectory_transformer.config import ModelConfig, TokenConfig, TrainConfig
from trajectory_transformer.data.episode import Dataset, Dimension
from trajectory_transformer.model.trajectory_model import TrajectoryModel
from trajectory_transformer.tokens.windows import Batch, gather_windows, tokenize
from trajectory_transformer.training.augment import grid_augment
from trajectory_transformer.training.train import Trainer

SIZE, WINDOW = 11, 14
AHEAD = [(1, 0), (0, 1), (-1, 0), (0, -1)]  # x, y of each direction


@pytest.fixture(scope="module")
def dataset() -> Dataset:
    """Episodes of both policies on small maps."""
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
    """The window from the first step of every episode, long enough for all of it."""
    data = tokenize(dataset, model.discretizer, model.layout, model.tokens)
    return gather_windows(data, data.end_window - data.num_steps, WINDOW, model.layout, model.tokens)


def replay(walls: np.ndarray, doors: np.ndarray, start: list[int], actions: list[int]) -> Iterator[list[int]]:
    """States after each action, by MiniGrid's rules: an oracle apart from it."""
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


def test_windows_seen_another_way_follow_the_maps_seen_that_way(dataset: Dataset) -> None:
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
        assert torch.equal(other.tokens == SIZE, batch.tokens == SIZE), "stop tokens stay"
        assert torch.equal(other.maps.sum(dim=(2, 3)), batch.maps.sum(dim=(2, 3))), "nothing is lost"
        for tokens, map in zip(other.tokens, other.maps, strict=True):
            assert follows_its_own_map(tokens, map, SIZE)
        seen.add(other.maps[0].numpy().tobytes())
    assert len(seen) > 15, "the same map looks different nearly every time"


def test_a_window_may_stay_as_it_is(dataset: Dataset) -> None:
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


def test_batches_are_a_function_of_seed_and_step(dataset: Dataset) -> None:
    model = make_model(dataset)
    data = tokenize(dataset, model.discretizer, model.layout, model.tokens)
    config = TrainConfig(steps=3, batch_size=8, augment="grid")
    batches = []
    for _ in range(2):
        trainer = Trainer(model, data, config)
        trainer.step = 2
        batches.append(trainer.batch(*trainer.draw()))
    assert torch.equal(batches[0].tokens, batches[1].tokens)
    plain = Trainer(model, data, TrainConfig(steps=3, batch_size=8))
    plain.step = 2
    assert not torch.equal(plain.batch(*plain.draw()).tokens, batches[0].tokens)


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore:TensorFloat32 tensor cores:UserWarning")
def test_recorded_steps_see_every_batch_another_way(dataset: Dataset) -> None:
    def losses_of(**changes: bool | str) -> list[float]:
        model = make_model(dataset)
        data = tokenize(dataset, model.discretizer, model.layout, model.tokens).to(torch.device("cuda"))
        model.gpt.to("cuda")
        config = TrainConfig(steps=9, batch_size=8, warmup_steps=2, log_every=1, augment="grid", **changes)  # type: ignore[arg-type]
        return [metrics.loss for metrics in Trainer(model, data, config).run() if metrics]

    plain = losses_of(precision="float32", compile=False, graph=False)
    assert losses_of(precision="float32", compile=False) == pytest.approx(plain, rel=1e-5)
    assert losses_of() == losses_of(), "bit by bit"


def test_what_is_no_agent_on_a_map_is_refused(dataset: Dataset, tiny_model: TrajectoryModel) -> None:
    with pytest.raises(ValueError, match="train.augment grid needs a goal of x and y"):
        grid_augment(tiny_model)
    with pytest.raises(
        ValueError, match="train.augment grid needs a token for each of 11 cells: raise tokens.num_bins"
    ):
        grid_augment(make_model(dataset, num_bins=8))
