"""Losses and updates equal those of d3rlpy, from the same weights, on the same batches, with the same noise.

docs/baselines.md lists where the definitions differ; the tests choose settings in which both mean the same.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from trajectory_transformer.baselines.algorithm import Algorithm, Sizes, normal
from trajectory_transformer.baselines.bc import BC, BCSettings
from trajectory_transformer.baselines.cql import CQL, CQLSettings
from trajectory_transformer.baselines.data import Batch
from trajectory_transformer.baselines.iql import IQL, IQLSettings
from trajectory_transformer.baselines.networks import Group
from trajectory_transformer.baselines.td3bc import TD3BC, TD3BCSettings

d3rlpy = pytest.importorskip("d3rlpy", reason="needs: pip install 'trajectory-transformer[d3rlpy]'")

O, A, B, STEPS = 5, 3, 32, 4  # noqa: E741
HIDDEN = (24, 16)
CPU = torch.device("cpu")


def batches(count: int = STEPS) -> Iterator[tuple[Batch, Any]]:
    """The same random transitions for both."""
    generator = torch.Generator().manual_seed(0)
    for _ in range(count):
        states, following = (torch.randn(B, O, generator=generator) for _ in range(2))
        actions = torch.rand(B, A, generator=generator) * 2 - 1
        rewards = torch.randn(B, 1, generator=generator)
        ends = (torch.rand(B, 1, generator=generator) < 0.2).float()
        own = Batch(states[None], actions[None], rewards.T, following[None], 1.0 - ends.T)
        theirs = d3rlpy.torch_utility.TorchMiniBatch(
            observations=states,
            actions=actions,
            rewards=rewards,
            next_observations=following,
            next_actions=actions,
            returns_to_go=rewards,
            terminals=ends,
            intervals=torch.ones(B, 1),
            device="cpu:0",
        )
        yield own, theirs


def linears(module: nn.Module) -> list[nn.Linear]:
    """Linear layers in the order of the forward pass."""
    return [each for each in module.modules() if isinstance(each, nn.Linear)]


def layers(tensors: Mapping[str, Tensor], name: str, index: int = 0) -> list[tuple[Tensor, Tensor]]:
    """Weight [out, in] and bias [out] of each layer of one of our networks."""
    found: list[tuple[Tensor, Tensor]] = []
    while f"{name}.{len(found)}.weight" in tensors:
        place = f"{name}.{len(found)}"
        found.append((tensors[f"{place}.weight"][index].T, tensors[f"{place}.bias"][index, 0]))
    return found


def give(module: nn.Module, own: Sequence[tuple[Tensor, Tensor]]) -> None:
    """Copy our weights to theirs. Two last layers of theirs share one of ours: mean and log standard deviation."""
    with torch.no_grad():
        for layer, (weight, bias) in zip(linears(module), split(module, own), strict=True):
            layer.weight.copy_(weight)
            layer.bias.copy_(bias)


def split(module: nn.Module, own: Sequence[tuple[Tensor, Tensor]]) -> list[tuple[Tensor, Tensor]]:
    """Our layers in the shapes of theirs."""
    parts = list(own)
    if len(linears(module)) == len(parts) + 1:
        weight, bias = parts.pop()
        parts += list(zip(weight.chunk(2), bias.chunk(2), strict=True))
    return parts


def check_weights(module: nn.Module, own: Sequence[tuple[Tensor, Tensor]]) -> None:
    for layer, (weight, bias) in zip(linears(module), split(module, own), strict=True):
        torch.testing.assert_close(weight, layer.weight, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(bias, layer.bias, rtol=1e-5, atol=1e-6)


def check_gradients(group: Group, name: str, module: nn.Module, optimizer: Any, index: int = 0) -> None:
    """First moments of Adam: they are the gradients of the steps so far, so scale and sign are compared too."""
    moments, start = {}, 0
    for key, value in group.tensors.items():
        moments[key] = group.first[start : start + value.numel()].view(value.shape)
        start += value.numel()
    state = optimizer.optim.state
    for layer, (weight, bias) in zip(linears(module), split(module, layers(moments, name, index)), strict=True):
        scale = float(state[layer.weight]["exp_avg"].abs().max())
        torch.testing.assert_close(weight, state[layer.weight]["exp_avg"], rtol=1e-4, atol=1e-5 * scale)
        torch.testing.assert_close(bias, state[layer.bias]["exp_avg"], rtol=1e-4, atol=1e-5 * scale)


def make(config: Any) -> Any:
    """The implementation behind one of their algorithms, with networks of our sizes."""
    encoder = d3rlpy.models.VectorEncoderFactory(list(HIDDEN))
    for name in ("encoder_factory", "actor_encoder_factory", "critic_encoder_factory", "value_encoder_factory"):
        if hasattr(config, name):
            setattr(config, name, encoder)
    algorithm = config.create(device="cpu:0")
    algorithm.create_impl((O,), A)
    return algorithm.impl


def move_targets(algorithm: Algorithm[Any]) -> None:
    """Make the target networks differ from the networks they follow."""
    generator = torch.Generator().manual_seed(1)
    for copy in algorithm.copies.values():
        copy.flat += 0.05 * torch.randn(copy.flat.shape, generator=generator)


def give_twins(modules: Any, tensors: Mapping[str, Tensor]) -> None:
    for index, module in enumerate(modules):
        give(module, layers(tensors, "q", index))


def close(found: Tensor, expected: float) -> None:
    assert float(found[0]) == pytest.approx(expected, rel=1e-5, abs=1e-6)


def test_behaviour_cloning() -> None:
    own = BC(BCSettings(hidden=HIDDEN), Sizes(O, A), [0], CPU)
    theirs = make(d3rlpy.algos.BCConfig(learning_rate=3e-4))
    give(theirs.modules.imitator, layers(own.actor.tensors, "policy"))
    for step, (batch, their_batch) in enumerate(batches()):
        losses = own.update(batch, torch.empty(1, B, 0), "")
        expected = theirs.inner_update(their_batch, step + 1)
        close(losses["actor"], expected["loss"])
        check_weights(theirs.modules.imitator, layers(own.actor.tensors, "policy"))
        check_gradients(own.actor, "policy", theirs.modules.imitator, theirs.modules.optim)


def test_td3_plus_bc(monkeypatch: pytest.MonkeyPatch) -> None:
    own = TD3BC(TD3BCSettings(hidden=HIDDEN), Sizes(O, A), [0], CPU)
    move_targets(own)
    theirs = make(d3rlpy.algos.TD3PlusBCConfig())
    modules = theirs.modules
    give(modules.policy, layers(own.actor.tensors, "policy"))
    give(modules.targ_policy, layers(own.target_actor.tensors, "policy"))
    give_twins(modules.q_funcs, own.critics.tensors)
    give_twins(modules.targ_q_funcs, own.target_critics.tensors)
    generator = torch.Generator().manual_seed(2)
    for step, (batch, their_batch) in enumerate(batches()):
        noise = torch.rand(1, B, A, generator=generator)
        with monkeypatch.context() as patched:
            patched.setattr(torch, "randn", lambda *_, noise=noise, **__: normal(noise[0]))
            expected = theirs.inner_update(their_batch, step + 1)
        kind = own.variant(step)
        assert kind == ("actor" if step % 2 else "critics")
        losses = own.update(batch, noise, kind)
        close(losses["critic"], expected["critic_loss"])
        if kind == "actor":
            close(losses["actor"], expected["actor_loss"])
            close(losses["clone"], expected["bc_loss"])
            check_gradients(own.actor, "policy", modules.policy, modules.actor_optim)
        check_weights(modules.policy, layers(own.actor.tensors, "policy"))
        check_weights(modules.targ_policy, layers(own.target_actor.tensors, "policy"))
        for index in range(2):
            check_weights(modules.q_funcs[index], layers(own.critics.tensors, "q", index))
            check_weights(modules.targ_q_funcs[index], layers(own.target_critics.tensors, "q", index))
            check_gradients(own.critics, "q", modules.q_funcs[index], modules.critic_optim, index)


@pytest.mark.parametrize(("expectile", "temperature"), [(0.7, 3.0), (0.9, 10.0)])
def test_implicit_q_learning(expectile: float, temperature: float) -> None:
    settings = IQLSettings(hidden=HIDDEN, expectile=expectile, temperature=temperature)
    own = IQL(settings, Sizes(O, A), [0], CPU)
    move_targets(own)
    theirs = make(d3rlpy.algos.IQLConfig(expectile=expectile, weight_temp=temperature))
    modules = theirs.modules
    give(modules.policy, layers(own.actor.tensors, "policy"))
    give(modules.value_func, layers(own.critics.tensors, "v"))
    give_twins(modules.q_funcs, own.critics.tensors)
    give_twins(modules.targ_q_funcs, own.targets.tensors)
    for step, (batch, their_batch) in enumerate(batches()):
        # Theirs is a parameter squashed between -5 and 2, ours is clipped to these limits.
        parameter = modules.policy._logstd
        with torch.no_grad():
            squashed = -5.0 + 7.0 * torch.sigmoid(parameter)
            own.actor.tensors["log_std"].copy_(squashed[None])
        expected = theirs.inner_update(their_batch, step + 1)
        losses = own.update(batch, torch.empty(1, B, 0), "")
        close(losses["q"], expected["q_loss"])
        close(losses["v"], expected["v_loss"])
        close(losses["actor"], expected["actor_loss"])
        check_weights(modules.policy, layers(own.actor.tensors, "policy"))
        check_weights(modules.value_func, layers(own.critics.tensors, "v"))
        check_gradients(own.actor, "policy", modules.policy, modules.actor_optim)
        check_gradients(own.critics, "v", modules.value_func, modules.critic_optim)
        for index in range(2):
            check_weights(modules.q_funcs[index], layers(own.critics.tensors, "q", index))
            check_weights(modules.targ_q_funcs[index], layers(own.targets.tensors, "q", index))
            check_gradients(own.critics, "q", modules.q_funcs[index], modules.critic_optim, index)
        if step == 0:
            slope = 7.0 * 0.25  # of the squashing at 0
            gradient = own.actor.first[-A:] * slope
            their_gradient = modules.actor_optim.optim.state[parameter]["exp_avg"][0]
            torch.testing.assert_close(gradient, their_gradient, rtol=1e-4, atol=1e-7)


def test_conservative_q_learning(monkeypatch: pytest.MonkeyPatch) -> None:
    number, weight = 4, 3.0
    settings = CQLSettings(hidden=HIDDEN, num_actions=number, conservative_weight=weight, clone_steps=0)
    own = CQL(settings, Sizes(O, A), [0], CPU)
    move_targets(own)
    # A fixed weight instead of a Lagrange multiplier.
    config = d3rlpy.algos.CQLConfig(
        conservative_weight=weight, n_action_samples=number, alpha_learning_rate=0.0, alpha_threshold=0.0
    )
    theirs = make(config)
    modules = theirs.modules
    give(modules.policy, layers(own.actor.tensors, "policy"))
    give_twins(modules.q_funcs, own.critics.tensors)
    give_twins(modules.targ_q_funcs, own.targets.tensors)
    generator = torch.Generator().manual_seed(2)
    for step, (batch, their_batch) in enumerate(batches()):
        noise = torch.rand(1, B, own.noise, generator=generator)
        noise[..., A : 2 * A] = 0.5  # theirs bootstraps from the mean action
        actor, _, pair, uniform = torch.split(noise[0], [A, A, 2 * number * A, number * A], dim=-1)
        current, following = pair.reshape(B, 2, number, A).unbind(1)
        drawn = [current.transpose(0, 1), following.transpose(0, 1), actor]

        def rsample(distribution: Any, shape: Any = (), drawn: list[Tensor] = drawn) -> Tensor:
            del shape
            found: Tensor = distribution.loc + distribution.scale * normal(drawn.pop(0))
            return found

        def uniform_(tensor: Tensor, *_: float, uniform: Tensor = uniform) -> Tensor:
            return tensor.copy_((2.0 * uniform - 1.0).reshape(tensor.shape))

        with monkeypatch.context() as patched:
            patched.setattr(torch.distributions.Normal, "rsample", rsample)
            patched.setattr(Tensor, "uniform_", uniform_)
            expected = theirs.inner_update(their_batch, step + 1)
        assert not drawn
        losses = own.update(batch, noise, own.variant(step))
        close(losses["critic"] + losses["conservative"], expected["critic_loss"])
        close(losses["conservative"], expected["conservative_loss"])
        close(losses["actor"], expected["actor_loss"])
        close(losses["temperature"], expected["temp"])
        # The gradient of theirs is multiplied by the temperature, which is near 1 here.
        torch.testing.assert_close(own.temperature.tensors["log"], modules.log_temp._parameter, rtol=0, atol=1e-6)
        check_weights(modules.policy, layers(own.actor.tensors, "policy"))
        check_gradients(own.actor, "policy", modules.policy, modules.actor_optim)
        for index in range(2):
            check_weights(modules.q_funcs[index], layers(own.critics.tensors, "q", index))
            check_weights(modules.targ_q_funcs[index], layers(own.targets.tensors, "q", index))
            check_gradients(own.critics, "q", modules.q_funcs[index], modules.critic_optim, index)
