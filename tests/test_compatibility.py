"""Files written before version 0.1 still load, and give the same numbers.

`golden/before` holds them. The expected numbers were computed by the code that wrote them (commit 8f70430).
"""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from trajectory_transformer.checkpoint import token_config_from
from trajectory_transformer.config import ModelConfig, SearchConfig, TokenConfig, TrainConfig
from trajectory_transformer.data.episode import Dataset, Dimension, load_npz, save_npz
from trajectory_transformer.model.trajectory_model import TrajectoryModel
from trajectory_transformer.planner import Planner
from trajectory_transformer.tokens.tokenizer import Tokenizer
from trajectory_transformer.tokens.windows import tokenize
from trajectory_transformer.training.train import Trainer

BEFORE = Path(__file__).parent / "golden" / "before"


def test_a_model_with_rewards_loads_with_its_settings() -> None:
    model = TrajectoryModel.load(BEFORE / "run")
    assert model.tokenizer.config == TokenConfig(num_bins=8, termination_penalty=-5.0, truncated="stop")
    assert model.gpt.config == ModelConfig(window=3, num_layers=1, num_heads=2, width=8, dropout=0.1)
    assert (model.layout.goal_dim, model.layout.observation_dim, model.layout.action_dim) == (0, 3, 2)
    assert model.layout.rewards and model.layout.map_shape == ()
    assert model.metadata == {"env": "Nowhere-v0", "seed": 1}
    expected = [-7.16745982, -8.21780791, -4.2846416, -1.0, -1.0, -8.2446917, -125.97875698]
    np.testing.assert_allclose(model.tokenizer.discretizer.values[:, 0], expected, rtol=1e-8)


@torch.no_grad()
def test_the_logits_of_a_model_with_rewards_are_unchanged() -> None:
    model = TrajectoryModel.load(BEFORE / "run")
    tokens = torch.arange(20) * 5 % 9
    logits = model.gpt(tokens[None])[0]
    assert logits.shape == (20, 9)
    after_6 = [-0.370111, 2.085532, 0.040896, -0.971153, 0.907153, 0.294716, 0.300552, 1.387685, -0.099719]
    last = [1.025546, -0.584181, -1.321177, -0.188497, -1.398365, 0.807966, -1.577517, -1.522639, -1.06226]
    np.testing.assert_allclose(logits[[6, -1]].numpy(), [after_6, last], rtol=0, atol=5e-6)
    assert float(logits.double().sum()) == pytest.approx(-5.296188, abs=1e-4)
    assert float(logits.double().square().sum()) == pytest.approx(146.948105, rel=1e-6)


@torch.no_grad()
def test_the_logits_of_a_model_with_maps_are_unchanged() -> None:
    model, dataset = TrajectoryModel.load(BEFORE / "map_run"), load_npz(BEFORE / "maps.npz")
    assert model.layout.map_shape == (2, 6, 6) and model.gpt.config.map_channels == 2
    assert model.tokenizer.config == TokenConfig(num_bins=7, goal_dims=(0, 1), rewards=False, truncated="stop")
    embedding = model.encode_maps(dataset.episodes[0].map)
    assert embedding is not None
    expected = [-4.5231951e-04, 2.0257747e-03, -2.6738094e-03, 6.3832500e-05]
    np.testing.assert_allclose(embedding[0, :4].numpy(), expected, rtol=0, atol=1e-7)
    tokens = torch.arange(9) * 5 % 8
    logits = model.gpt(tokens[None], embedding)[0]
    last = [0.271302, -0.518547, 0.096299, 0.764464, -0.295954, -0.227802, -0.401545, 0.102692]
    np.testing.assert_allclose(logits[-1].numpy(), last, rtol=0, atol=5e-6)
    assert float(logits.double().square().sum()) == pytest.approx(41.570961, rel=1e-6)


def test_an_old_model_plans_and_is_saved_in_the_new_format(tmp_path: Path) -> None:
    model = TrajectoryModel.load(BEFORE / "run")
    search = SearchConfig(beam_width=4, horizon=2)
    action = Planner(str(BEFORE / "run"), search=search).act([0.0, 0.5, 1.0])
    assert action.shape == (2,) and np.isfinite(action).all()
    model.save(tmp_path / "new")
    again = TrajectoryModel.load(tmp_path / "new")
    assert (again.tokenizer.config, again.gpt.config) == (model.tokenizer.config, model.gpt.config)
    np.testing.assert_array_equal(Planner(again, search=search).act([0.0, 0.5, 1.0]), action)


def test_an_old_run_continues_with_the_same_losses() -> None:
    model = TrajectoryModel.load(BEFORE / "run")
    model = replace(model, gpt=TrajectoryModel.build(model.tokenizer, model.gpt.config, {}, seed=9).gpt)
    data = tokenize(load_npz(BEFORE / "reward.npz"), model.tokenizer)
    trainer = Trainer(model, data, TrainConfig(steps=16, batch_size=4, learning_rate=6e-4), seed=2, log_every=1)
    trainer.load(BEFORE / "run" / "resume.safetensors")
    assert trainer.step == 12
    stored = TrajectoryModel.load(BEFORE / "run").gpt.state_dict()
    for name, value in model.gpt.state_dict().items():
        assert torch.equal(value, stored[name]), name
    losses = [metrics.loss for metrics in trainer.run() if metrics is not None]
    # Where dropout takes its random numbers from MKL, they are others than on the machine of the old run.
    tolerance = 0.2 if torch._C.has_mkl else 1e-5
    assert losses == pytest.approx([5.341123104, 5.242053986, 5.371181965, 5.646230698], rel=tolerance)


def test_an_old_dataset_loads_with_its_maps(tmp_path: Path) -> None:
    with np.load(BEFORE / "maps.npz") as file:
        assert "contexts" in file.files and "maps" not in file.files
    dataset = load_npz(BEFORE / "maps.npz")
    assert [len(episode) for episode in dataset] == [28, 19, 21, 27, 18, 23]
    assert [0 if episode.map is None else int(episode.map.sum()) for episode in dataset] == [17, 23, 26, 12, 23, 24]
    assert dataset.map_shape == (2, 6, 6)
    assert dataset.action_dimensions == (Dimension("action 0", 7),)
    assert dataset.observation_dimensions == tuple(
        Dimension(f"observation {index}", categories) for index, categories in enumerate((6, 6, 4))
    )
    save_npz(dataset, tmp_path / "new.npz")
    assert_equal(load_npz(tmp_path / "new.npz"), dataset)
    with np.load(tmp_path / "new.npz") as file:
        assert "maps" in file.files and "contexts" not in file.files


def assert_equal(found: Dataset, expected: Dataset) -> None:
    """Compare the arrays of all episodes."""
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        assert one.terminated == other.terminated
        for name in ("observations", "actions", "rewards", "goal", "map"):
            np.testing.assert_array_equal(getattr(one, name), getattr(other, name), err_msg=name)


def test_an_old_dataset_gives_the_tokens_of_its_run() -> None:
    # The bins fitted on the old dataset are those stored with the model.
    dataset, model = load_npz(BEFORE / "reward.npz"), TrajectoryModel.load(BEFORE / "run")
    assert dataset.metadata == {"env": "Nowhere-v0", "seed": 1}
    fitted = Tokenizer.fit(dataset, model.tokenizer.config)
    np.testing.assert_array_equal(fitted.discretizer.values, model.tokenizer.discretizer.values)
    for found, expected in zip(fitted.discretizer.edges, model.tokenizer.discretizer.edges, strict=True):
        np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize(("loss_mask", "authors"), [("target", False), ("input", True)])
def test_old_settings_of_the_authors_code_become_one_switch(loss_mask: str, authors: bool) -> None:
    old = {
        "num_bins": 100,
        "discretizer": "quantile",
        "bin_value": "midpoint" if authors else "mean",
        "goal_dims": [1],
        "rewards": True,
        "discount": 0.99,
        "value_includes_reward": False,
        "termination_penalty": -100.0,
        "truncated": "stop",
        "final_observation": not authors,
        "max_episode_steps": 1000 if authors else None,
        "loss_mask": loss_mask,
    }
    expected = TokenConfig(goal_dims=(1,), termination_penalty=-100.0, truncated="stop", authors_conventions=authors)
    assert token_config_from(old) == expected
