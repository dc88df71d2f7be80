"""The shared training loop: runs resume to the same bits; learners trained together equal those trained alone."""

import dataclasses
import functools
import json
import math
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from tests.baselines.conftest import SMALL, SMALL_OF
from trajectory_transformer.baselines import PRESETS, Baseline, BaselineMetrics, brac, cql, train_baseline
from trajectory_transformer.baselines.algorithm import Settings, Sizes
from trajectory_transformer.baselines.data import Batch, Learner
from trajectory_transformer.baselines.dt import DTSettings
from trajectory_transformer.baselines.iql import IQL, IQLSettings
from trajectory_transformer.baselines.networks import (
    Group,
    Network,
    cosine,
    init_networks,
    mlp,
    rounded_twin_q,
    twin_q,
)
from trajectory_transformer.baselines.presets import changed
from trajectory_transformer.baselines.runs import make_trainer
from trajectory_transformer.baselines.train import BaselineTrainer, draw
from trajectory_transformer.data.episode import Dataset, Episode
from trajectory_transformer.model.trajectory_model import TrajectoryModel
from trajectory_transformer.rollout import Step

CPU = torch.device("cpu")
ALGORITHMS = sorted(name for name in PRESETS if "-" not in name)  # without those that only differ in settings


def settings_of(name: str, **values: object) -> Settings:
    """Small networks."""
    return changed(PRESETS[name].settings, {**SMALL, **SMALL_OF.get(name, {}), **values})


def trained(trainer: BaselineTrainer[Any], steps: int | None = None) -> list[BaselineMetrics]:
    """Train to the end or to a step; the metrics on the way."""
    found = []
    for metrics in trainer.run():
        found += [metrics] if metrics is not None else []
        if trainer.step == steps:
            break
    return found


def weights(trainer: BaselineTrainer[Any]) -> dict[str, torch.Tensor]:
    return {name: value.detach().clone() for name, value in trainer.state().items() if not name.startswith("sums")}


@pytest.mark.parametrize("name", ALGORITHMS)
@pytest.mark.parametrize("stop", [1, 4, 7])
def test_a_stopped_run_resumes_to_the_same_bits(tiny_dataset: Dataset, tmp_path: Path, name: str, stop: int) -> None:
    settings = settings_of(name, steps=10)

    def make() -> BaselineTrainer[Any]:
        trainer = make_trainer(name, settings, [tiny_dataset], [Learner(3), Learner(5)], device=CPU)[0]
        trainer.log_every = 4
        return trainer

    whole = make()
    expected = trained(whole)
    stopped = make()
    before = trained(stopped, stop)
    stopped.save(tmp_path / "state.safetensors")
    resumed = make()
    resumed.load(tmp_path / "state.safetensors")
    assert resumed.step == stop
    found = before + trained(resumed)
    assert [(each.step, each.losses) for each in found] == [(each.step, each.losses) for each in expected]
    for key, value in weights(whole).items():
        assert torch.equal(weights(resumed)[key], value), key


@pytest.mark.parametrize("name", ALGORITHMS)
def test_learners_trained_together_equal_learners_trained_alone(
    tiny_dataset: Dataset, points: Dataset, name: str
) -> None:
    settings = settings_of(name, steps=6)
    other = Dataset(tiny_dataset.episodes[2:], tiny_dataset.metadata)
    learners = [Learner(0), Learner(7), Learner(0, dataset=1)]
    together, _ = make_trainer(name, settings, [tiny_dataset, other], learners, device=CPU)
    metrics = trained(together)
    for index, (seed, dataset) in enumerate(learners):
        alone, _ = make_trainer(name, settings, [[tiny_dataset, other][dataset]], [Learner(seed)], device=CPU)
        expected = trained(alone)
        for found, one in zip(metrics, expected, strict=True):
            for key, values in found.losses.items():
                assert values[index] == pytest.approx(one.losses[key][0], rel=1e-3, abs=1e-5), key
        own = weights(alone)
        for key, value in weights(together).items():
            if value.ndim > 1:
                count = len(value) // len(learners)
                torch.testing.assert_close(
                    value[index * count : (index + 1) * count], own[key], rtol=1e-4, atol=1e-5, msg=key
                )


def test_learners_with_different_seeds_differ(tiny_dataset: Dataset) -> None:
    trainer, _ = make_trainer("bc", settings_of("bc", steps=3), [tiny_dataset], [Learner(0), Learner(1)], device=CPU)
    weight = trainer.algorithm.groups["actor"].tensors["policy.0.weight"]
    assert float((weight[0] - weight[1]).detach().abs().mean()) > 0.1, "initial weights"
    first = trained(trainer)[0]
    assert first.losses["actor"][0] != first.losses["actor"][1]


def test_random_numbers_are_a_function_of_key_step_and_place() -> None:
    keys = torch.tensor([5, 6])
    step = torch.tensor(9)
    bits = draw(keys, step, 3, 100, 4)
    assert bits.shape == (3, 2, 100, 4)
    assert torch.equal(draw(keys[1:], step, 3, 100, 4)[:, 0], bits[:, 1])
    assert torch.equal(draw(keys, step + 2, 1, 100, 4)[0], bits[2])
    assert len(np.unique(bits.numpy())) == bits.numel()


def test_batches_reach_every_row_equally_often(tiny_dataset: Dataset, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer, _ = make_trainer("bc", settings_of("bc"), [tiny_dataset], [Learner(0)], device=CPU)
    number = tiny_dataset.num_steps
    counts = torch.zeros(number)
    rows, gather = trainer.rows, trainer.rows.gather
    seen: list[torch.Tensor] = []

    def recorded(index: torch.Tensor) -> Any:
        seen.append(index)
        return gather(index)

    monkeypatch.setattr(rows, "gather", recorded)
    trainer._take_steps([""] * 200)
    counts += torch.bincount(torch.cat(seen).flatten(), minlength=number)
    expected = 200 * 64 / number
    assert ((counts - expected).abs() < 5 * expected**0.5).all()
    assert int(trainer.rows.counts[0]) == number


def test_transitions_hold_final_states_and_only_true_ends(tiny_dataset: Dataset) -> None:
    trainer, _ = make_trainer("iql", settings_of("iql", rewards="raw"), [tiny_dataset], [Learner(0)], device=CPU)
    number = tiny_dataset.num_steps
    batch = trainer.rows.gather(torch.arange(number)[None])
    row = 0
    for episode in tiny_dataset:
        for step in range(len(episode)):
            assert np.array_equal(batch.observations[0, row], episode.observations[step])
            assert np.array_equal(batch.next_observations[0, row], episode.observations[step + 1])
            assert np.array_equal(batch.actions[0, row], episode.actions[step])
            assert episode.rewards is not None and batch.rewards[0, row] == episode.rewards[step]
            ended = episode.terminated and step == len(episode) - 1
            assert float(batch.continues[0, row]) == (0.0 if ended else 1.0)
            row += 1
    assert row == number


def test_rewards_and_states_are_scaled_as_the_settings_say(tiny_dataset: Dataset) -> None:
    returns = [episode.total_reward for episode in tiny_dataset]
    rewards = np.concatenate([episode.rewards for episode in tiny_dataset if episode.rewards is not None])
    observations = np.concatenate([episode.observations[:-1] for episode in tiny_dataset])
    index = torch.arange(tiny_dataset.num_steps)[None]

    def rows(**values: object) -> Any:
        trainer, _ = make_trainer("iql", settings_of("iql", **values), [tiny_dataset], [Learner(0)], device=CPU)
        return trainer.rows.gather(index)

    expected = rewards * 1000 / (max(returns) - min(returns))
    np.testing.assert_allclose(rows(rewards="return-range").rewards[0], expected, rtol=1e-5)
    np.testing.assert_allclose(rows(rewards="minus-one").rewards[0], rewards - 1, rtol=1e-6)
    np.testing.assert_allclose(rows(rewards="centered").rewards[0], 4 * (rewards - 0.5), rtol=1e-5, atol=1e-5)
    scaled = (observations - observations.mean(axis=0)) / (observations.std(axis=0) + 1e-3)
    np.testing.assert_allclose(rows(states="standard").observations[0], scaled, rtol=1e-4, atol=1e-5)


def test_presets_for_mazes_scale_a_reward_at_the_goal_and_none_elsewhere(tiny_dataset: Dataset) -> None:
    first = tiny_dataset.episodes[0]
    episode = dataclasses.replace(first, rewards=np.eye(1, len(first), dtype=np.float32)[0])

    def seen(name: str) -> list[float]:
        small = {**SMALL, **SMALL_OF.get(name.split("-")[0], {})}
        settings = changed(PRESETS[name].settings, {key: small[key] for key in ("hidden", "batch_size")})
        trainer, _ = make_trainer(name, settings, [Dataset((episode,))], [Learner(0)], device=CPU)
        rewards: list[float] = trainer.rows.gather(torch.arange(2)[None]).rewards[0].tolist()
        return rewards

    assert seen("iql-antmaze") == seen("iql-antmaze-wide") == [0.0, -1.0]
    assert seen("cql-antmaze") == [2.0, -2.0]
    asked = PRESETS["dt-antmaze"].settings
    assert isinstance(asked, DTSettings) and asked.return_scale == 1.0  # the model is asked for 1, not for 0.001


def test_actions_outside_one_are_scaled_to_the_limits_of_the_data() -> None:
    actions = np.array([[-3.0, 0.1], [1.0, 0.3], [2.0, 0.2]], np.float32)
    episode = Episode(np.zeros((4, 1), np.float32), actions, np.zeros(3, np.float32), terminated=False)
    baseline = train_baseline(Dataset((episode,)), algorithm="bc", settings={**SMALL, "steps": 1}, device="cpu")
    scaled = baseline.scaling.actions(torch.from_numpy(actions)[None])
    np.testing.assert_allclose(scaled[0], [[-1.0, -1.0], [0.6, 1.0], [1.0, 0.0]], atol=1e-6)
    np.testing.assert_allclose(baseline.scaling.real_actions(scaled)[0], actions, atol=1e-6)
    yes = np.ones(1, np.bool_)
    step = Step(np.zeros((1, 1), np.float32), np.zeros(1, np.float32), yes, np.zeros((1, 0), np.float32), yes)
    own = baseline.algorithm.act(baseline.scaling.observations(torch.zeros(1, 1, 1)))[0].detach().numpy()
    expected = own * [2.5, 0.1] + [-0.5, 0.2]  # the middle of the limits, and half their distance
    np.testing.assert_allclose(baseline.policy().act(step), expected, atol=1e-6)


@pytest.mark.parametrize("name", ["cql", "brac"])
def test_squashed_policies_aim_beyond_the_limits_and_are_clipped(name: str, tmp_path: Path) -> None:
    actions = np.array([[-3.0], [2.0], [2.0]], np.float32)
    episode = Episode(np.zeros((4, 1), np.float32), actions, np.zeros(3, np.float32), terminated=False)
    settings = {**SMALL, "steps": 1, "action_margin": 0.25}
    train_baseline(Dataset((episode,)), algorithm=name, settings=settings, out=tmp_path / "run", device="cpu")
    scaling = Baseline.load(tmp_path / "run").scaling
    np.testing.assert_allclose(scaling.actions(torch.from_numpy(actions)[None])[0], [[-0.8], [0.8], [0.8]], atol=1e-6)
    aims = torch.tensor([[[-1.0], [-0.8], [0.0], [0.4], [0.9]]])
    np.testing.assert_allclose(scaling.real_actions(aims)[0], [[-3.0], [-3.0], [-0.5], [0.75], [2.0]], atol=1e-6)


@pytest.mark.parametrize("name", ["cql", "brac"])
def test_actions_at_a_limit_are_cloned(name: str) -> None:
    """Half of the actions are clipped at 1, the others lie around 0.5: the policy aims between them."""
    rng = np.random.default_rng(0)
    free = np.clip(rng.normal(0.5, 0.05, size=(1000, 1)), -1, 1)
    actions = np.where(rng.random((1000, 1)) < 0.5, 1.0, free).astype(np.float32)
    episode = Episode(np.zeros((1001, 1), np.float32), actions, np.zeros(1000, np.float32), terminated=False)
    rates = {"actor_learning_rate": 1e-2} if name == "cql" else {"clone_learning_rate": 2e-2, "actor_hidden": [8]}
    settings = {"steps": 600, "clone_steps": 600, "hidden": [8], "batch_size": 256, **rates}
    baseline = train_baseline(Dataset((episode,)), algorithm=name, settings=settings, device="cpu")
    groups, state = baseline.algorithm.groups, torch.zeros(1, 1, 1)
    if name == "cql":
        mean, log_std = cql.gaussian(groups["actor"].tensors, state)
    else:
        mean, log_std = brac.gaussian(groups["behaviour"].tensors, "behaviour", state)
    assert 0.8 < baseline.scaling.real_actions(torch.tanh(mean)).item() < 0.88  # without a margin: brac 0.93
    assert -1.0 < log_std.item() < 0.0  # without a margin: cql 0.96


def test_hidden_layers_are_rounded_to_bfloat16_and_the_last_is_not() -> None:
    almost_one = 1.0 + 2.0**-10  # bfloat16 rounds it to 1
    tensors = {"q.0.weight": torch.full((2, 2, 1), almost_one), "q.1.weight": torch.full((2, 1, 1), almost_one)}
    tensors |= {"q.0.bias": torch.ones(2, 1, 1), "q.1.bias": torch.zeros(2, 1, 1)}
    x = torch.ones(1, 1, 1)
    assert twin_q(tensors, x, x).flatten().tolist() == pytest.approx([(2 * almost_one + 1) * almost_one] * 2, abs=1e-6)
    assert rounded_twin_q(tensors, x, x).flatten().tolist() == pytest.approx([3 * almost_one] * 2, abs=1e-6)


def test_rounded_values_follow_exact_ones() -> None:
    networks = init_networks({"q": Network((5, 32, 16, 1), per_learner=2)}, [0, 1])
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(2, 40, 3, generator=generator), torch.randn(2, 40, 2, generator=generator)
    exact, rounded = twin_q(networks, *inputs), rounded_twin_q(networks, *inputs)
    assert rounded.dtype == torch.float32 and not torch.equal(exact, rounded)
    assert (rounded - exact).norm() < 0.02 * exact.norm()


def test_bfloat16_rounds_the_conservative_term_of_cql_alone() -> None:
    generator = torch.Generator().manual_seed(0)
    observations, following = torch.randn(2, 2, 32, 3, generator=generator)
    actions, noise = torch.rand(2, 32, 2, generator=generator), torch.rand(2, 32, 2 * 32, generator=generator)
    batch = Batch(observations, 2 * actions - 1, observations[..., 0], following, torch.ones(2, 32))

    def terms(bfloat16: bool) -> tuple[Tensor, Tensor, Tensor]:
        own = cql.CQL(cql.CQLSettings(hidden=(64, 64), bfloat16=bfloat16), Sizes(3, 2), [0, 1], CPU)
        _, *parts = torch.split(noise, [2, 2, 40, 20], dim=-1)
        error, conservative = own.critic_losses(batch, *parts)
        gradients = torch.autograd.grad(conservative.sum(), list(own.critics.tensors.values()))
        return error, conservative, torch.cat([gradient.flatten() for gradient in gradients])

    exact, rounded = terms(False), terms(True)
    assert torch.equal(exact[0], rounded[0]), "Bellman errors are computed in float32"
    assert not torch.equal(exact[1], rounded[1])
    torch.testing.assert_close(rounded[1], exact[1], rtol=1e-3, atol=0)
    assert rounded[2].dtype == torch.float32
    assert (rounded[2] - exact[2]).norm() < 0.05 * exact[2].norm()


def test_a_saved_baseline_loads_to_the_same_policy(tiny_dataset: Dataset, tmp_path: Path) -> None:
    made = train_baseline(
        tiny_dataset, algorithm="iql", settings={**SMALL, "steps": 3}, seeds=[4, 9], out=tmp_path / "run", device="cpu"
    )
    loaded = Baseline.load(tmp_path / "run")
    assert loaded.seeds == (4, 9) and loaded.name == "iql" and loaded.metadata == tiny_dataset.metadata
    observations = torch.randn(2, 5, 3)
    assert torch.equal(loaded.algorithm.act(observations), made.algorithm.act(observations))
    for index, seed in enumerate((4, 9)):
        own = loaded.only(seed).algorithm.act(observations[index : index + 1])
        torch.testing.assert_close(own, made.algorithm.act(observations)[index : index + 1])
    with pytest.raises(ValueError, match="trained with the seeds \\[4, 9\\], not with 5"):
        loaded.policy(5)
    names = set(load_file(tmp_path / "run" / "weights.safetensors"))
    assert {"critics.q.0.weight", "actor.log_std", "scaling.reward_scale"} <= names


@pytest.mark.parametrize("name", ["bc", "td3bc", "iql", "cql"])
def test_losses_and_optimizers_compile_without_graph_breaks(
    tiny_dataset: Dataset, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Traced by torch's compiler, but run without generated kernels, which would take long."""
    settings = settings_of(name, steps=4, hidden=[8, 8], batch_size=8, **({"clone_steps": 2} if name == "cql" else {}))
    plain, traced = (make_trainer(name, settings, [tiny_dataset], [Learner(0)], device=CPU)[0] for _ in range(2))
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="eager", fullgraph=True))
    traced.algorithm.compile()
    for found, expected in zip(trained(traced), trained(plain), strict=True):
        for key, values in expected.losses.items():
            assert found.losses[key] == pytest.approx(values, rel=1e-5)
    for key, value in weights(plain).items():
        torch.testing.assert_close(weights(traced)[key], value, rtol=1e-5, atol=1e-6, msg=key)


@pytest.mark.parametrize("name", ["td3bc", "iql", "cql"])
def test_q_functions_take_and_return_real_units(tiny_dataset: Dataset, name: str) -> None:
    """The smaller of two networks, evaluated by hand on scaled inputs."""
    shifted = Dataset(
        tuple(
            dataclasses.replace(each, actions=3 * each.actions, observations=5 + 2 * each.observations)
            for each in tiny_dataset
        )
    )
    settings = {**SMALL, "steps": 3, "states": "standard", "rewards": "return-range"}
    baseline = train_baseline(shifted, algorithm=name, settings=settings, seeds=[1, 2], device="cpu")
    states, actions = torch.randn(4, 6, 3) + 5, 3 * torch.rand(4, 6, 2) - 1.5
    found = baseline.q_function(2)(states, actions)
    assert found.shape == (4, 6)
    scaling, tensors = baseline.scaling, baseline.algorithm.groups["critics"].tensors
    inputs = torch.cat(
        [
            (states - scaling.observation_mean[1]) / scaling.observation_std[1],
            (actions - scaling.action_middle[1]) / scaling.action_range[1],
        ],
        dim=-1,
    )
    values = []
    for network in (2, 3):  # those of the second learner
        x = inputs
        for layer in range(len([key for key in tensors if key.startswith("q.") and key.endswith("weight")])):
            x = torch.relu(x) if layer else x
            x = x @ tensors[f"q.{layer}.weight"][network] + tensors[f"q.{layer}.bias"][network]
        values.append(x[..., 0])
    expected = torch.minimum(values[0], values[1]).detach() / float(scaling.reward_scale[1])
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    assert float(scaling.reward_scale[1]) != 1.0


def test_layer_norm_is_that_of_torch_in_q_and_v_and_not_in_the_policy(tiny_dataset: Dataset) -> None:
    plain, normed = settings_of("iql", expectile=0.8), settings_of("iql", expectile=0.8, layer_norm=True)
    trainer, baseline = make_trainer("iql", normed, [tiny_dataset], [Learner(0)], device=CPU)
    _, without = make_trainer("iql", plain, [tiny_dataset], [Learner(0)], device=CPU)
    batch = trainer.rows.gather(torch.arange(20)[None])
    tensors = baseline.algorithm.groups["critics"].tensors

    def expected(name: str, network: int, x: torch.Tensor) -> torch.Tensor:
        depth = len(plain.hidden)
        for layer in range(depth + 1):
            x = x @ tensors[f"{name}.{layer}.weight"][network] + tensors[f"{name}.{layer}.bias"][network]
            if layer < depth:
                x = torch.nn.LayerNorm(x.shape[-1], elementwise_affine=False)(x).relu()
        return x[..., 0]

    both = torch.cat([batch.observations, batch.actions], dim=-1)[0]
    smaller = torch.minimum(expected("q", 0, both), expected("q", 1, both))
    torch.testing.assert_close(baseline.algorithm.q_values(batch.observations, batch.actions)[0], smaller)
    target_q = torch.full((1, 20), 100.0)  # above all values: every weight is the expectile
    algorithm: Any = baseline.algorithm
    value_loss = algorithm.critic_losses(batch, target_q)[1]
    value = expected("v", 0, batch.observations[0])
    torch.testing.assert_close(value_loss[0], (0.8 * (100.0 - value).square()).mean())
    assert torch.equal(baseline.algorithm.act(batch.observations), without.algorithm.act(batch.observations))
    assert not torch.allclose(without.algorithm.q_values(batch.observations, batch.actions)[0], smaller)


def test_waves_are_sines_and_cosines_of_the_chosen_dimensions_for_all_networks(tiny_dataset: Dataset) -> None:
    settings = cast(IQLSettings, settings_of("iql", states="standard", wave_dims=(2, 0)))
    trainer, baseline = make_trainer("iql", settings, [tiny_dataset], [Learner(0)], device=CPU)
    batch = trainer.rows.gather(torch.arange(20)[None])
    observations = batch.observations
    angles = [observations[0, :, dim] * (2 * math.pi / period) for period in (3.0, 1.5, 0.75) for dim in (2, 0)]
    inputs = torch.stack(
        [*observations[0].T, *(angle.sin() for angle in angles), *(angle.cos() for angle in angles)], 1
    )

    def expected(group: str, name: str) -> torch.Tensor:
        tensors, x = baseline.algorithm.groups[group].tensors, inputs
        for layer in range(len(settings.hidden) + 1):
            x = (x.relu() if layer else x) @ tensors[f"{name}.{layer}.weight"][0] + tensors[f"{name}.{layer}.bias"][0]
        return x

    algorithm: Any = baseline.algorithm
    torch.testing.assert_close(algorithm.act(observations)[0], expected("actor", "policy").tanh())
    value_loss = algorithm.critic_losses(batch, torch.full((1, 20), 100.0))[1]  # above all values
    value = expected("critics", "v")[:, 0]
    torch.testing.assert_close(value_loss[0], (settings.expectile * (100.0 - value).square()).mean())
    inputs = torch.cat([inputs, batch.actions[0]], dim=1)
    torch.testing.assert_close(
        algorithm._twin_q(algorithm.critics.tensors, observations, batch.actions)[0, 0], expected("critics", "q")[:, 0]
    )


def test_values_start_at_the_initial_value_and_policies_do_not_see_it(tiny_dataset: Dataset) -> None:
    made = {
        value: make_trainer("iql", settings_of("iql", initial_value=value), [tiny_dataset], [Learner(0)], device=CPU)
        for value in (0.0, -500.0)
    }
    (trainer, plain), (_, low) = made[0.0], made[-500.0]
    batch = trainer.rows.gather(torch.arange(20)[None])
    found = low.algorithm.q_values(batch.observations, batch.actions)
    torch.testing.assert_close(found, plain.algorithm.q_values(batch.observations, batch.actions) - 500.0)
    one, other = (cast(IQL, each.algorithm) for each in (low, plain))
    torch.testing.assert_close(one._value(batch.observations), other._value(batch.observations) - 500.0)
    assert torch.equal(one.target_q(batch), found)  # the target network starts there too
    assert torch.equal(low.algorithm.act(batch.observations), plain.algorithm.act(batch.observations))


def test_the_rate_of_values_decays_only_if_asked_for(tiny_dataset: Dataset) -> None:
    def changes(settings: Settings) -> list[float]:
        """Mean change of the values in the first and in the last step."""
        trainer, baseline = make_trainer("iql", settings, [tiny_dataset], [Learner(0)], device=CPU)
        batch, found = trainer.rows.gather(torch.arange(20)[None]), []
        for _ in range(settings.steps):
            before = baseline.algorithm.groups["critics"].flat.clone()
            baseline.algorithm.update(batch, torch.empty(1, 20, 0), "")
            found.append(float((baseline.algorithm.groups["critics"].flat - before).abs().mean()))
        return [found[0], found[-1]]

    first, last = changes(settings_of("iql", steps=20))
    decayed_first, decayed_last = changes(settings_of("iql", steps=20, critic_decay=True))
    assert decayed_first == pytest.approx(first, rel=1e-4)
    assert decayed_last < 0.02 * last  # the cosine is 0.006 there


def test_waves_of_a_dimension_that_the_data_lacks_are_refused(tiny_dataset: Dataset) -> None:
    with pytest.raises(ValueError, match=r"wave_dims must lie below the 3 observation dimensions, got \(3,\)"):
        make_trainer("iql", settings_of("iql", wave_dims=(3,)), [tiny_dataset], [Learner(0)], device=CPU)
    with pytest.raises(ValueError, match="wave_dims must not be negative"):
        settings_of("iql", wave_dims=(-1,))


def test_multiples_of_large_states_look_the_same_after_layer_norm_so_presets_standardise() -> None:
    tensors = init_networks({"v": Network((6, 32, 32, 1))}, [0])
    x = torch.randn(1, 8, 6, generator=torch.Generator().manual_seed(0))
    near, far = (mlp(tensors, "v", size * x, layer_norm=True) for size in (1000.0, 2000.0))
    torch.testing.assert_close(near, far, atol=2e-3, rtol=0)
    assert (mlp(tensors, "v", x, layer_norm=True) - mlp(tensors, "v", 2 * x, layer_norm=True)).abs().max() > 0.02
    normed = [each.settings for each in PRESETS.values() if getattr(each.settings, "layer_norm", False)]
    assert normed and all(settings.states == "standard" for settings in normed)


def test_behaviour_cloning_has_no_q_function(tiny_dataset: Dataset) -> None:
    baseline = train_baseline(tiny_dataset, algorithm="bc", settings={**SMALL, "steps": 1}, device="cpu")
    with pytest.raises(ValueError, match="BC has no Q function; train iql"):
        baseline.q_function()(torch.zeros(1, 3), torch.zeros(1, 2))


def test_the_rate_of_a_cosine_schedule_falls_from_one_to_zero() -> None:
    factor = cosine(100)
    assert [float(factor(torch.tensor(float(step)))) for step in (0, 50, 100, 120)] == pytest.approx([1, 0.5, 0, 0])


def test_adam_with_decoupled_weight_decay_equals_that_of_torch() -> None:
    generator = torch.Generator().manual_seed(0)
    start = torch.randn(3, 4, generator=generator)
    group = Group({"a": start[:1], "b": start[1:]}, 1e-2, device=CPU, betas=(0.8, 0.95), weight_decay=0.1)
    expected = start.clone().requires_grad_()
    optimizer = torch.optim.AdamW([expected], lr=1e-2, betas=(0.8, 0.95), weight_decay=0.1)
    for _ in range(5):
        scale = torch.randn(3, 4, generator=generator)
        expected.grad = torch.autograd.grad((expected.square() * scale).sum(), expected)[0]
        optimizer.step()
        own = torch.cat([group.tensors["a"], group.tensors["b"]])
        group.minimize((own.square() * scale).sum())
    torch.testing.assert_close(group.flat.view(3, 4), expected.detach(), rtol=1e-5, atol=1e-7)


def test_a_loss_that_is_not_finite_ends_the_run(tiny_dataset: Dataset) -> None:
    settings = {**SMALL, "steps": 50, "learning_rate": 1e30}
    with pytest.raises(ValueError, match=r"the loss \w+ is .* at step \d+: lower learning_rate"):
        train_baseline(tiny_dataset, algorithm="iql", settings=settings, device="cpu")


def test_datasets_of_different_sizes_cannot_share_a_step(tiny_dataset: Dataset, points: Dataset) -> None:
    with pytest.raises(ValueError, match="must have the same sizes"):
        make_trainer("bc", settings_of("bc"), [tiny_dataset, points], [Learner(0), Learner(0, 1)], device=CPU)


def test_checkpoints_that_do_not_fit_are_refused(tiny_dataset: Dataset, tmp_path: Path) -> None:
    train_baseline(tiny_dataset, algorithm="bc", settings={**SMALL, "steps": 1}, out=tmp_path / "run", device="cpu")
    with pytest.raises(ValueError, match="a checkpoint of kind .baseline., but kind .model. is needed"):
        TrajectoryModel.load(tmp_path / "run")
    path = tmp_path / "run" / "checkpoint.json"
    description = json.loads(path.read_text())
    description["algorithm"]["settings"]["hidden"] = [8]
    path.write_text(json.dumps(description))
    with pytest.raises(ValueError, match="weights and description do not match .*must have shape"):
        Baseline.load(tmp_path / "run")


def test_python_resumes_a_run_with_its_own_settings_only(tiny_dataset: Dataset, tmp_path: Path) -> None:
    settings: dict[str, object] = {**SMALL, "steps": 4}
    out = tmp_path / "run"
    made = train_baseline(tiny_dataset, algorithm="bc", settings=settings, seeds=[2], out=out, device="cpu")
    again = train_baseline(tiny_dataset, algorithm="bc", settings=settings, out=out, resume=True, device="cpu")
    assert again.seeds == (2,)
    observations = torch.randn(1, 5, 3)
    assert torch.equal(again.algorithm.act(observations), made.algorithm.act(observations))
    others: list[dict[str, Any]] = [{"algorithm": "cql"}, {"seeds": [3]}, {"settings": {"steps": 5}}]
    for other in others:
        with pytest.raises(ValueError, match="was started with other settings"):
            train_baseline(tiny_dataset, out=out, resume=True, device="cpu", **other)
    with pytest.raises(ValueError, match="started on a different dataset"):
        train_baseline(Dataset(tiny_dataset.episodes[1:]), out=out, resume=True, device="cpu")
    with pytest.raises(ValueError, match="on episodes in memory: pass them again"):
        train_baseline(out=out, resume=True, device="cpu")
