"""The Decision Transformer: windows, masks and memory by value, and the loss and update of d3rlpy."""

from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from tests.baselines.conftest import SMALL, point_episodes
from trajectory_transformer.baselines import PRESETS, train_baseline
from trajectory_transformer.baselines import dt as dt_module
from trajectory_transformer.baselines.algorithm import Sizes
from trajectory_transformer.baselines.data import Learner, fit_scaling
from trajectory_transformer.baselines.dt import DT, DTSettings
from trajectory_transformer.baselines.windows import WindowBatch, Windows
from trajectory_transformer.data.episode import Dataset, Episode
from trajectory_transformer.rollout import Step

CPU = torch.device("cpu")
TINY = DTSettings(hidden=(16, 16), num_heads=2, context=4, batch_size=8, dropout=0.0, warmup_steps=10)


def counting(lengths: tuple[int, ...] = (5, 2)) -> Dataset:
    """Episode e has observations 100 e + t, actions t / 10 and rewards t + 1."""
    episodes = []
    for number, length in enumerate(lengths):
        times = np.arange(length + 1, dtype=np.float32)
        episodes.append(
            Episode(100 * number + times[:, None], (times[:-1, None] / 10).astype(np.float32), times[:-1] + 1, False)
        )
    return Dataset(tuple(episodes))


def model(settings: DTSettings = TINY, seeds: tuple[int, ...] = (0,), spread: float = 0.3) -> DT:
    """A model whose weights are large enough to matter."""
    made = DT(settings, Sizes(2, 1), seeds, CPU)
    generator = torch.Generator().manual_seed(1)
    made.model.flat += spread * torch.randn(made.model.flat.shape, generator=generator)
    return made


def random_batch(size: int = 3, steps: int = 4, learners: int = 1) -> WindowBatch:
    generator = torch.Generator().manual_seed(2)
    shape = (learners, size, steps)
    return WindowBatch(
        torch.randn(*shape, 2, generator=generator),
        torch.rand(*shape, 1, generator=generator) * 2 - 1,
        torch.randn(*shape, generator=generator),
        torch.arange(steps).expand(shape) + torch.arange(size)[:, None],
        torch.ones(shape, dtype=torch.bool),
    )


def test_windows_start_at_their_row_and_are_padded_on_the_left() -> None:
    data = counting()
    scaling = fit_scaling([data], [Learner(0)], "raw", "raw")
    rows = Windows([data], [Learner(0)], scaling, CPU, context=3, return_scale=10.0)
    assert int(rows.counts[0]) == 7
    batch = rows.gather(torch.tensor([[1, 4, 5]]))
    assert batch.observations[0, 0, :, 0].tolist() == [1, 2, 3]
    assert batch.returns[0, 0].tolist() == pytest.approx([1.4, 1.2, 0.9])  # (2 + 3 + 4 + 5) / 10, ...
    assert batch.actions[0, 0, :, 0].tolist() == pytest.approx([0.1, 0.2, 0.3])
    assert batch.times[0, 0].tolist() == [1, 2, 3]
    assert batch.valid[0].tolist() == [[True] * 3, [False, False, True], [False, True, True]]
    assert batch.observations[0, 1, 2, 0] == 4 and batch.times[0, 1, 2] == 4
    assert batch.observations[0, 2, 1:, 0].tolist() == [100, 101]
    assert batch.returns[0, 2, 1:].tolist() == pytest.approx([0.3, 0.2])


def test_an_action_depends_on_the_past_alone() -> None:
    made, batch = model(), random_batch()
    before = made.forward(batch)
    changed = WindowBatch(*(value.clone() for value in vars(batch).values()))
    changed.actions[:, :, 2] += 1.0  # of step 2 itself
    changed.observations[:, :, 3] += 1.0
    changed.returns[:, :, 3] += 1.0
    after = made.forward(changed)
    assert torch.equal(after[:, :, :3], before[:, :, :3])
    assert not torch.allclose(after[:, :, 3], before[:, :, 3])
    for field, step in (("observations", 0), ("actions", 0), ("returns", 0), ("observations", 3), ("returns", 3)):
        changed = WindowBatch(*(value.clone() for value in vars(batch).values()))
        getattr(changed, field)[:, :, step] += 1.0
        assert not torch.allclose(made.forward(changed)[:, :, 3], before[:, :, 3]), (field, step)


def test_padding_is_neither_read_nor_trained_on() -> None:
    made, batch = model(), random_batch()
    short = WindowBatch(*(value[:, :, 2:] for value in vars(batch).values()))
    batch.valid[:, :, :2] = False
    torch.testing.assert_close(made.forward(batch)[:, :, 2:], made.forward(short))
    torch.testing.assert_close(made.loss(batch, torch.empty(0)), made.loss(short, torch.empty(0)))
    assert made.forward(batch).isfinite().all()


def test_loss_is_the_mean_squared_error_of_actions() -> None:
    made, batch = model(), random_batch()
    batch.valid[0, 0, :3] = False
    error = (made.forward(batch) - batch.actions).square()[0]
    expected = torch.cat([error[0, 3:], error[1], error[2]]).mean()
    torch.testing.assert_close(made.loss(batch, torch.empty(0))[0], expected)


def test_bfloat16_rounds_the_training_and_not_the_acting() -> None:
    batch, empty = random_batch(size=64), torch.empty(0)
    batch.actions.copy_(batch.observations[..., :1].tanh())
    exact, rounded = model(), model(replace(TINY, bfloat16=True))
    losses = [made.loss(batch, empty) for made in (exact, rounded)]
    assert losses[1].dtype == torch.float32 and not torch.equal(losses[0], losses[1])
    torch.testing.assert_close(losses[1], losses[0], rtol=0.01, atol=0.0)
    gradients = [
        torch.cat([each.flatten() for each in torch.autograd.grad(loss.sum(), list(made.model.tensors.values()))])
        for made, loss in zip((exact, rounded), losses, strict=True)
    ]
    assert gradients[1].dtype == torch.float32
    assert (gradients[1] - gradients[0]).norm() < 0.05 * gradients[0].norm()
    observations = batch.observations[:, :, 0]
    assert torch.equal(exact.act(observations), rounded.act(observations))


def test_gradients_are_clipped_for_each_learner_and_the_rate_warms_up(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = DTSettings(
        hidden=(16,), num_heads=1, context=4, dropout=0.0, warmup_steps=10, max_gradient=1e-3, weight_decay=0.0
    )
    made = DT(settings, Sizes(2, 1), (0, 1), CPU)
    seen: list[Any] = []
    apply = made.model.apply

    def note(gradients: Sequence[torch.Tensor]) -> None:
        seen.append(gradients)
        apply(gradients)

    monkeypatch.setattr(made.model, "apply", note)
    before = made.model.flat.clone()
    made.update(random_batch(learners=2), torch.empty(0), "")
    norms = torch.stack([gradient.flatten(1).square().sum(1) for gradient in seen[0]]).sum(0).sqrt()
    torch.testing.assert_close(norms, torch.tensor([1e-3, 1e-3]), rtol=1e-2, atol=0.0)
    largest = float((made.model.flat - before).abs().max())
    assert largest == pytest.approx(1e-4 / 10, rel=0.05)  # Adam's first step is the rate, here a tenth of it


def test_dropout_zeroes_its_share_and_is_off_when_acting() -> None:
    settings = DTSettings(hidden=(16, 16), num_heads=2, context=4, dropout=0.25)
    made, batch = model(settings), random_batch()
    noise = torch.rand(1, 3, made.noise, generator=torch.Generator().manual_seed(0))
    assert torch.equal(made.forward(batch, noise), made.forward(batch, noise))
    assert not torch.allclose(made.forward(batch, noise), made.forward(batch))
    # Rows with the same noise have the same mask, others do not, and calls differ.
    drop = dt_module._Dropout(0.25, noise[:, [0, 1, 2, 2]])
    first, second = drop(torch.ones(1, 4, 2000)), drop(torch.ones(1, 4, 50, 40)).flatten(2)
    assert sorted(set(first.flatten().tolist())) == pytest.approx([0.0, 1 / 0.75])
    for values in (first, second):
        assert (values == 0).float().mean(2)[0].tolist() == pytest.approx([0.25] * 4, abs=0.04)
        assert torch.equal(values[0, 2], values[0, 3])
    share = [((first[0, i] == 0) & (other == 0)).float().mean() for i, other in ((0, first[0, 1]), (1, second[0, 1]))]
    assert [float(each) for each in share] == pytest.approx([0.0625] * 2, abs=0.025)


def test_the_memory_equals_windows_made_by_hand() -> None:
    made = model(replace(TINY, target_return=7.0))
    data = Dataset(
        (Episode(np.zeros((2, 2), np.float32), np.zeros((1, 1), np.float32), np.zeros(1, np.float32), True),)
    )
    scaling = fit_scaling([data], [Learner(0)], "raw", "raw")
    act = made.make_actor(scaling)
    rng = np.random.default_rng(0)
    observations = rng.normal(size=(7, 2, 2)).astype(np.float32)  # of two environments
    rewards = rng.normal(size=(7, 2)).astype(np.float32)
    starts = np.array([[True, True], [False, False], [False, True], *[[False, False]] * 4])
    taken: list[np.ndarray[Any, Any]] = []
    for now in range(7):
        received = np.where(starts[now], 0, rewards[now]).astype(np.float32)
        step = Step(observations[now], received, starts[now], np.zeros((2, 0), np.float32), np.ones(2, np.bool_))
        taken.append(act(step))
        for env, begin in enumerate((0, 2 if now >= 2 else 0)):
            kept = range(max(begin, now - 3), now + 1)
            asked = [7.0 - rewards[begin + 1 : time + 1, env].sum() for time in kept]
            window = WindowBatch(
                torch.from_numpy(observations[kept, env])[None, None],
                torch.tensor([[[[taken[time][env, 0] if time < now else 0.0] for time in kept]]]),
                torch.tensor([[asked]]) / 1000.0,
                torch.tensor([[[time - begin for time in kept]]]),
                torch.ones(1, 1, len(kept), dtype=torch.bool),
            )
            expected = float(made.forward(window)[0, 0, -1, 0].detach())
            assert taken[now][env, 0] == pytest.approx(expected, abs=1e-5), (now, env)


def test_a_policy_does_what_it_is_asked_for() -> None:
    data = point_episodes(100)
    settings = {**SMALL, "steps": 250, "batch_size": 48, "learning_rate": 3e-3, "context": 3, "warmup_steps": 10}
    settings |= {"return_scale": 10.0, "dropout": 0.0}
    baseline = train_baseline(data, algorithm="dt", settings=settings, device="cpu")
    best = max(episode.total_reward for episode in data)

    def play(asked: float) -> float:
        chosen = baseline.with_settings({"target_return": asked})
        assert isinstance(chosen.algorithm, DT)
        assert float(chosen.algorithm.target()) == pytest.approx((asked or best) / 10.0)
        policy = chosen.policy()
        positions, rewards = np.linspace(-1, 1, 50, dtype=np.float32)[:, None], np.zeros(50, np.float32)
        total = np.zeros(50)
        for time in range(20):
            first = np.full(50, time == 0)
            actions = policy.act(Step(positions, rewards, first, np.zeros((50, 0), np.float32), ~first))
            positions = np.clip(positions + 0.4 * actions, -2, 2).astype(np.float32)
            rewards = -np.abs(positions[:, 0])
            total += rewards
        return float(total.mean())

    good, bad = play(0.0), play(-25.0)
    average = float(np.mean([episode.total_reward for episode in data]))
    assert good > average + 5 and bad < average


def test_targets_of_the_paper_are_presets() -> None:
    targets = {name: getattr(preset.settings, "target_return", 0.0) for name, preset in PRESETS.items()}
    assert {name: target for name, target in targets.items() if target} == {
        "dt-hopper": 3600.0,
        "dt-halfcheetah": 6000.0,
        "dt-halfcheetah-medium-expert": 12000.0,
        "dt-walker2d": 5000.0,
    }


def test_settings_that_cannot_be_built_are_refused() -> None:
    with pytest.raises(ValueError, match="hidden must be one width"):
        DTSettings(hidden=(128, 64))
    with pytest.raises(ValueError, match="multiple of num_heads, got 3"):
        DTSettings(num_heads=3)


def test_loss_and_update_equal_those_of_d3rlpy() -> None:
    """Differences of definition that are removed here.

    d3rlpy adds squared errors over action dimensions and averages over padded steps too; its blocks have a layer norm
    epsilon of 0.003; it trains the key biases, whose gradient is rounding error.
    """
    reason = "needs d3rlpy: pip install 'trajectory-transformer[d3rlpy]'"
    transformers = pytest.importorskip("d3rlpy.models.torch.transformers", reason=reason)
    encoders = pytest.importorskip("d3rlpy.models.encoders", reason=reason)
    implementation = pytest.importorskip("d3rlpy.algos.transformer.torch.decision_transformer_impl", reason=reason)
    settings = DTSettings(hidden=(16, 16), num_heads=2, context=4, dropout=0.0, warmup_steps=0, max_gradient=0.25)
    sizes = Sizes(3, 2)
    ours = DT(settings, sizes, (0,), CPU)
    ours.model.flat += 0.1 * torch.randn(ours.model.flat.shape, generator=torch.Generator().manual_seed(0))
    theirs = transformers.ContinuousDecisionTransformer(
        encoder=encoders.VectorEncoderFactory([16], exclude_last_activation=True).create((3,)),
        embed_size=16,
        position_encoding=transformers.SimplePositionEncoding(16, dt_module.MAX_TIME),
        action_size=2,
        num_heads=2,
        context_size=4,
        num_layers=2,
        attn_dropout=0.0,
        resid_dropout=0.0,
        embed_dropout=0.0,
        activation=torch.nn.ReLU(),
    )
    names = {"_rtg_embed": "return", "_action_embed": "action", "_output": "head", "_embed_ln": "embed_norm"}
    names |= {"_gpt2._layer_norm": "norm", "_encoder._layers.0": "state"}
    for index in range(2):
        block = f"_gpt2._transformer.{index}"
        names |= {f"{block}._layer_norm1": f"block{index}.norm1", f"{block}._layer_norm2": f"block{index}.norm2"}
        names |= {f"{block}._mlp._l1": f"block{index}.up", f"{block}._mlp._l2": f"block{index}.down"}
        names[f"{block}._attention._proj"] = f"block{index}.out"

    def converted() -> dict[str, torch.Tensor]:
        """Our weights by their names."""
        tensors = {name: value.detach()[0] for name, value in ours.model.tensors.items()}
        found = {"_position_encoding._embed.weight": tensors["time"]}
        for there, here in names.items():
            weight = tensors[f"{here}.weight"]
            found[f"{there}.weight"] = weight[0] if "norm" in here else weight.T
            found[f"{there}.bias"] = tensors[f"{here}.bias"][0]
        for index in range(2):
            weights = tensors[f"block{index}.qkv.weight"].chunk(3, dim=1)
            biases = tensors[f"block{index}.qkv.bias"].chunk(3, dim=1)
            for letter, weight, bias in zip("qkv", weights, biases, strict=True):
                place = f"_gpt2._transformer.{index}._attention._{letter}"
                found |= {f"{place}.weight": weight.T, f"{place}.bias": bias[0]}
        return {name: value.clone() for name, value in found.items()}

    generator = torch.Generator().manual_seed(3)
    batch = WindowBatch(
        torch.randn(1, 5, 4, 3, generator=generator),
        torch.rand(1, 5, 4, 2, generator=generator) * 2 - 1,
        torch.randn(1, 5, 4, generator=generator),
        torch.arange(4).expand(1, 5, 4) + torch.arange(5)[:, None],
        torch.ones(1, 5, 4, dtype=torch.bool),
    )
    batch.valid[0, 1, :2] = False
    for module in theirs.modules():
        if isinstance(module, torch.nn.LayerNorm):
            module.eps = dt_module.NORM_EPSILON
    missing = theirs.load_state_dict(converted(), strict=False)
    assert not missing.unexpected_keys and all(name.endswith("_mask") for name in missing.missing_keys)
    optimizer = torch.optim.AdamW(theirs.parameters(), lr=1e-4, weight_decay=1e-4)
    valid = batch.valid[0].float()
    predicted = theirs(batch.observations[0], batch.actions[0], batch.returns[0][..., None], batch.times[0], 1 - valid)
    given = SimpleNamespace(observations=batch.observations[0], actions=batch.actions[0], masks=valid)
    given.returns_to_go, given.timesteps = batch.returns[0][..., None], batch.times[0]
    holder = SimpleNamespace(_modules=SimpleNamespace(transformer=theirs))
    loss = implementation.DecisionTransformerImpl.compute_loss(holder, given)
    torch.testing.assert_close(ours.forward(batch)[0][batch.valid[0]], predicted[batch.valid[0]], atol=1e-5, rtol=1e-5)
    share = 2 * valid.mean()  # of action dimensions and padded steps
    torch.testing.assert_close(share * ours.loss(batch, torch.empty(0))[0], loss, atol=1e-5, rtol=1e-5)
    (loss / share).backward()
    norm = torch.nn.utils.clip_grad_norm_(theirs.parameters(), 0.25)
    assert norm > 0.25
    optimizer.step()
    ours.update(batch, torch.empty(0), "")
    updated, started = dict(theirs.named_parameters()), 0
    for name, value in converted().items():
        if name.endswith("_attention._k.bias"):
            continue
        torch.testing.assert_close(value, updated[name].detach(), atol=1e-5, rtol=1e-5, msg=name)
        started += 1
    assert started == len(updated) - 2
