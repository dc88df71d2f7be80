"""Beam search for return: on small tasks with a known optimum, decoder against decoder, and what objectives see."""

import copy
import functools
import itertools
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.search.lottery import LOTTERY, SAFE, first_choice, lottery_model
from trajectory_transformer.config import ModelConfig, Sampler, SearchConfig, TokenConfig
from trajectory_transformer.model.gpt import GPT
from trajectory_transformer.search.beam import Plan, beam_search
from trajectory_transformer.search.cached import CachedDecoder
from trajectory_transformer.search.decoder import Bins, Candidates, Decoder, NaiveDecoder, StepwiseDecoder
from trajectory_transformer.search.noise import Noise
from trajectory_transformer.search.objectives import discounted_return, log_likelihood, q_guided
from trajectory_transformer.tokens.discretizer import Discretizer
from trajectory_transformer.tokens.layout import TokenLayout
from trajectory_transformer.tokens.tokenizer import Tokenizer

TOY = TokenLayout(goal_dim=0, observation_dim=1, action_dim=1, rewards=True)
NUM_STATES = 5
STOP = NUM_STATES
VALUES = torch.tensor([[0.0, 1.0, 2.0, 3.0, 4.0]] * 2 + [[-1.0, 0.0, 1.0, 5.0, 20.0]] + [[0.0, 1.0, 2.0, 3.0, 10.0]])


class ToyTask(StepwiseDecoder):
    """A deterministic task as a decoder: tables give what follows a state and an action (0 or 1, equally likely).

    `ends` are (state, action) pairs after which every token is the stop token.
    """

    def __init__(
        self,
        next_state: list[list[int]],
        reward: list[list[int]],
        value: list[list[int]],
        ends: set[tuple[int, int]] | None = None,
        after_end: int = STOP,
    ) -> None:
        gpt = GPT(TOY, NUM_STATES, ModelConfig(window=50, num_layers=1, num_heads=1, width=4))
        super().__init__(gpt)
        self.tables = {"state": next_state, "reward": reward, "value": value}
        self.ends, self.after_end = ends or set(), after_end

    def logits(self) -> Tensor:
        envs, candidates, _ = self.tokens.shape
        logits = torch.full((envs, candidates, NUM_STATES + 1), -torch.inf)
        for env, candidate in itertools.product(range(envs), range(candidates)):
            row = self.prompt[env].tolist() + self.tokens[env, candidate].tolist()
            logits[env, candidate, self._options(row)] = 0.0
        return logits

    def _options(self, row: list[int]) -> list[int]:
        slot = len(row) % 4
        last = row[len(row) - slot :]  # the unfinished transition
        whole = [tuple(row[start : start + 2]) for start in range(0, len(row) - slot, 4)]
        if any(pair in self.ends for pair in whole) or STOP in row:
            return [self.after_end if slot >= 2 else STOP]
        if slot == 0:
            state, action = row[-4], row[-3]
            return [self.tables["state"][state][action]]
        if slot == 1:
            return [0, 1]
        return [self.tables["reward" if slot == 2 else "value"][last[0]][last[1]]]


def plan(decoder: StepwiseDecoder, start: int, *, width: int, horizon: int, discount: float = 0.5) -> Plan:
    config = SearchConfig(beam_width=width, expansion=8, horizon=horizon, action=Sampler())
    return beam_search(
        decoder,
        torch.tensor([[start]]),
        discounted_return(discount),
        bins=Bins(TOY, VALUES),
        config=config,
        noise=Noise(torch.tensor([3])),
    )


def exhaustive(decoder: ToyTask, start: int, horizon: int, discount: float) -> tuple[float, list[int]]:
    """The best score and actions of all possible plans."""
    best: tuple[float, list[int]] = (-np.inf, [])
    for actions in itertools.product((0, 1), repeat=horizon):
        state, total, over, worth = start, 0.0, False, 0.0
        for step, action in enumerate(actions):
            reward = float(VALUES[2, decoder.tables["reward"][state][action]]) if not over else 0.0
            worth = float(VALUES[3, decoder.tables["value"][state][action]]) if not over else 0.0
            total += discount**step * reward
            over = over or (state, action) in decoder.ends
            state = decoder.tables["state"][state][action]
        best = max(best, (total + discount**horizon * worth, list(actions)))
    return best


def actions_of(tokens: Tensor, horizon: int) -> list[int]:
    return [int(tokens[4 * step]) for step in range(horizon)]


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("with_ends", [False, True])
def test_the_optimum_of_a_random_task_is_found(seed: int, with_ends: bool) -> None:
    rng = np.random.default_rng(seed)
    next_state, reward, value = (rng.integers(0, 5, (5, 2)).tolist() for _ in range(3))
    ends = {(state, int(rng.integers(2))) for state in range(3)} if with_ends else set()
    decoder = ToyTask(next_state, reward, value, ends=ends)
    found = plan(decoder, 0, width=32, horizon=4)
    score, actions = exhaustive(decoder, 0, 4, 0.5)
    assert float(found.scores[0, 0]) == pytest.approx(score)
    assert exhaustive_score(decoder, actions_of(found.best[0], 4)) == pytest.approx(score), actions


def exhaustive_score(decoder: ToyTask, actions: list[int]) -> float:
    """The score of a plan by the tables; after the end actions are stop tokens and count nothing."""
    state, total, worth = 0, 0.0, 0.0
    for step, action in enumerate(actions):
        if action == STOP:
            return total
        total += 0.5**step * float(VALUES[2, decoder.tables["reward"][state][action]])
        worth = float(VALUES[3, decoder.tables["value"][state][action]])
        if (state, action) in decoder.ends:
            return total + (0.5 ** (step + 1) * worth if step == len(actions) - 1 else 0.0)
        state = decoder.tables["state"][state][action]
    return total + 0.5 ** len(actions) * worth


# A corridor of five cells with the goal at its right end. The data walks left more often, so that predicted values
# are largest there, where nothing is ever earned. Action 1 steps right, action 0 left.
CORRIDOR = ToyTask(
    next_state=[[0, 1], [0, 2], [1, 3], [2, 4], [4, 4]],
    reward=[[1, 1], [1, 1], [1, 1], [1, 4], [1, 1]],
    value=[[4, 2], [3, 1], [2, 1], [1, 0], [0, 0]],
    ends={(3, 1)},
)


def corridor_q(discount: float) -> dict[tuple[int, int], float]:
    """The optimal Q of the corridor, by value iteration on its tables."""
    tables = CORRIDOR.tables
    q = {(state, action): 0.0 for state in range(4) for action in (0, 1)}
    for _ in range(50):
        for state, action in q:
            following = tables["state"][state][action]
            future = 0.0 if (state, action) in CORRIDOR.ends else max(q[following, each] for each in (0, 1))
            q[state, action] = float(VALUES[2, tables["reward"][state][action]]) + discount * future
    return q


@pytest.mark.parametrize("horizon", [1, 2, 3])
def test_q_guided_search_finds_the_optimum_where_predicted_values_mislead(horizon: int) -> None:
    exact = corridor_q(0.9)
    assert exact[0, 1] == pytest.approx(0.9**3 * 20)

    def q(states: Tensor, actions: Tensor) -> Tensor:
        rows = zip(states.flatten().tolist(), actions.flatten().tolist(), strict=True)
        return torch.tensor([exact.get((int(state), int(action)), 0.0) for state, action in rows]).view(
            states.shape[:2]
        )

    config = SearchConfig(beam_width=8, expansion=4, horizon=horizon, action=Sampler())
    found, misled = (
        beam_search(
            CORRIDOR,
            torch.tensor([[0]]),
            objective,
            bins=Bins(TOY, VALUES),
            config=config,
            noise=Noise(torch.tensor([3])),
        )
        for objective in (q_guided(q, 0.9), discounted_return(0.9))
    )
    # Plans for the exact Q are optimal and worth what the optimal policy earns, whatever their length.
    assert actions_of(found.best[0], horizon) == [1] * horizon
    assert float(found.scores[0, 0]) == pytest.approx(0.9**3 * 20, rel=1e-5)
    assert actions_of(misled.best[0], horizon) == [0] * horizon


def test_a_small_discount_prefers_an_early_reward_to_a_large_one() -> None:
    # Action 1 earns 5 now and nothing later; action 0 earns 0 now and 20 one step later.
    next_state = [[1, 2], [1, 1], [2, 2], [3, 3], [4, 4]]
    reward = [[1, 3], [4, 4], [1, 1], [1, 1], [1, 1]]
    value = [[0, 0]] * 5
    decoder = ToyTask(next_state, reward, value)
    large, early = (plan(decoder, 0, width=8, horizon=2, discount=discount) for discount in (0.9, 0.1))
    assert actions_of(large.best[0], 1) == [0]
    assert float(large.scores[0, 0]) == pytest.approx(0.0 + 0.9 * 20)
    assert actions_of(early.best[0], 1) == [1]
    assert float(early.scores[0, 0]) == pytest.approx(5.0)


def test_values_count_rewards_beyond_the_horizon() -> None:
    # The rewards are equal, but the return-to-go is 1 for action 0 and 10 for action 1.
    decoder = ToyTask([[0, 0]] * 5, [[1, 1]] * 5, [[1, 4]] * 5)
    found = plan(decoder, 0, width=4, horizon=1)
    assert actions_of(found.best[0], 1) == [1]
    assert float(found.scores[0, 0]) == pytest.approx(0.0 + 0.5 * 10.0)


def test_rewards_predicted_after_an_end_do_not_count() -> None:
    # Action 1 ends the task, after which the model wrongly predicts a reward of 20; action 0 earns 1 per step.
    next_state = [[0, 0]] * 5
    reward = [[2, 1]] * 5
    decoder = ToyTask(next_state, reward, [[0, 0]] * 5, ends={(0, 1)}, after_end=4)
    found = plan(decoder, 0, width=16, horizon=3, discount=1.0)
    assert actions_of(found.best[0], 3) == [0, 0, 0]
    assert float(found.scores[0, 0]) == pytest.approx(3.0)


def test_the_first_action_is_never_the_stop_token_and_later_ones_may_be() -> None:
    decoder = ToyTask([[0, 0]] * 5, [[1, 1]] * 5, [[0, 0]] * 5, ends={(0, 0), (0, 1)})
    found = plan(decoder, 0, width=4, horizon=2)
    assert actions_of(found.best[0], 1)[0] in (0, 1)
    assert actions_of(found.best[0], 2)[1] == STOP


def random_gpt(layout: TokenLayout, window: int, seed: int, num_bins: int = 7) -> GPT:
    torch.manual_seed(seed)
    gpt = GPT(layout, num_bins, ModelConfig(window=window, num_layers=2, num_heads=2, width=16)).eval()
    for parameter in gpt.parameters():
        if parameter.ndim > 1:
            torch.nn.init.normal_(parameter, std=0.4)
    return gpt


SHAPES = {
    "plain": TokenLayout(0, 2, 1, rewards=False),
    "rewards": TokenLayout(0, 2, 2, rewards=True),
    "goal": TokenLayout(2, 2, 1, rewards=False),
    "goal-rewards": TokenLayout(1, 3, 1, rewards=True),
}


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize(("window", "horizon"), [(6, 3), (3, 6), (2, 5)])
def test_naive_and_cached_return_the_same_tokens(name: str, window: int, horizon: int) -> None:
    # 4 layouts x 3 windows x 6 seeds x 8 environments: 576 prompts, some with stop tokens; every length of the past.
    layout = SHAPES[name]
    objective = discounted_return(0.9) if layout.rewards else log_likelihood
    for seed in range(6):
        gpt = random_gpt(layout, window, seed)
        rng = torch.Generator().manual_seed(seed)
        past = seed % window
        prompt = torch.randint(8, (8, layout.length(past) + layout.observation_dim), generator=rng)
        values = torch.randn(layout.size, 7, generator=rng)
        action, observation = Sampler(nucleus=0.4, temperature=0.8), Sampler(temperature=0.8)
        config = SearchConfig(beam_width=5, horizon=horizon, action=action, observation=observation)
        search: Callable[[Decoder], Plan] = functools.partial(
            beam_search,
            prompt=prompt,
            objective=objective,
            bins=Bins(layout, values),
            config=config,
            noise=Noise(torch.arange(8)),
        )
        naive, cached = search(NaiveDecoder(gpt)), search(CachedDecoder(gpt))
        same = (naive.tokens == cached.tokens).all(dim=(1, 2))
        torch.testing.assert_close(naive.scores[same], cached.scores[same], atol=1e-4, rtol=1e-4)
        if not same.all():
            # Equal scores, for example of candidates that have ended, are ordered by rounding errors.
            nudged = torch.stack([search(NaiveDecoder(nudge(gpt, each))).tokens for each in range(5)])
            assert (nudged != naive.tokens).any(dim=(0, 2, 3))[~same].all(), seed


def nudge(gpt: GPT, seed: int) -> GPT:
    """The same model with weights that differ by rounding errors."""
    other, rng = copy.deepcopy(gpt), torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.mul_(1.0 + 1e-6 * torch.randn(parameter.shape, generator=rng))
    return other


def test_a_plan_does_not_depend_on_other_environments() -> None:
    layout = SHAPES["rewards"]
    gpt = random_gpt(layout, 4, 0)
    prompts = torch.randint(7, (3, layout.observation_dim), generator=torch.Generator().manual_seed(0))
    values = torch.randn(layout.size, 7, generator=torch.Generator().manual_seed(1))

    def search(rows: list[int]) -> Tensor:
        noise = Noise(torch.tensor([50 + row for row in rows]))
        config = SearchConfig(beam_width=4, horizon=4)
        bins, objective = Bins(layout, values), discounted_return(0.9)
        decoder = CachedDecoder(gpt)
        return beam_search(decoder, prompts[rows], objective, bins=bins, config=config, noise=noise).tokens

    together = search([0, 1, 2])
    for row in range(3):
        assert torch.equal(search([row])[0], together[row])


def test_copies_of_a_good_start_do_not_crowd_out_a_later_reward() -> None:
    # Action 1 earns 5 now, action 0 earns 20 one step later; there is room for two candidates only.
    next_state = [[1, 2], [1, 1], [2, 2], [3, 3], [4, 4]]
    decoder = ToyTask(next_state, [[1, 3], [4, 4], [1, 1], [1, 1], [1, 1]], [[0, 0]] * 5)
    found = plan(decoder, 0, width=2, horizon=2, discount=0.9)
    assert actions_of(found.best[0], 1) == [0]


def check_decoded_candidates(decoder: Decoder, gpt: GPT, *, seed: int = 0) -> tuple[int, int]:
    """Compare what an objective sees in a search with the tokens decoded by a tokenizer.

    Returns how many candidates of all steps contained a stop token, and how many did not.
    """
    layout, num_bins = gpt.layout, gpt.num_bins
    rng = np.random.default_rng(seed)
    values = rng.normal(size=(layout.size, num_bins)).astype(np.float32).astype(np.float64)
    tokenizer = Tokenizer(layout, Discretizer((np.zeros(1),) * layout.size, values), TokenConfig(num_bins=num_bins))
    prompt = torch.from_numpy(rng.integers(num_bins, size=(2, layout.length(1) + layout.observation_dim)))
    state = prompt[:, -layout.observation_dim :].numpy()
    horizons, counts = [], [0, 0]

    def objective(candidates: Candidates) -> Tensor:
        envs, count, _ = candidates.tokens.shape
        tokens = candidates.tokens.numpy()
        states = np.broadcast_to(state[:, None], (envs, count, state.shape[1]))
        decoded = tokenizer.decode(states, tokens)
        horizons.append(decoded.actions.shape[2])
        # From the first stop token of a state or an action on, everything is 0.
        rows = np.concatenate([states, tokens], axis=2).reshape(envs, count, -1, layout.size)
        stops = rows == num_bins
        stops[..., layout.action.stop :] = False
        alive = (stops.reshape(envs, count, -1).cumsum(axis=2) == 0).reshape(rows.shape)
        for found, exact, slots in (
            (candidates.states, decoded.states, layout.observation),
            (candidates.actions, decoded.actions, layout.action),
        ):
            expected = np.where(alive[..., slots], exact, 0.0)
            np.testing.assert_array_equal(found.numpy(), expected.astype(np.float32))
        first = tokenizer.discretizer.decode(state, layout.observation)[:, None].repeat(count, axis=1)
        np.testing.assert_array_equal(candidates.states[:, :, 0].numpy(), first.astype(np.float32))
        ended = candidates.ended.numpy()
        np.testing.assert_array_equal(ended, ~alive[:, :, -1, layout.action.stop - 1])
        counts[0] += int(ended.sum())
        counts[1] += int((~ended).sum())
        return candidates.actions.sum(dim=(2, 3)) - candidates.states.abs().sum(dim=(2, 3))

    bins = Bins(layout, torch.from_numpy(values).float())
    config = SearchConfig(beam_width=12, horizon=4, action=Sampler(), observation=Sampler())
    beam_search(decoder, prompt, objective, bins=bins, config=config, noise=Noise(torch.tensor([seed, seed + 1])))
    assert horizons == [1, 2, 3, 4]
    return counts[0], counts[1]


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("kind", [NaiveDecoder, CachedDecoder])
def test_objectives_see_states_and_actions_in_real_units(kind: type[NaiveDecoder | CachedDecoder], name: str) -> None:
    gpt = random_gpt(SHAPES[name], 4, 0)
    counts = [check_decoded_candidates(kind(gpt), gpt, seed=seed) for seed in range(3)]
    assert all(sum(part) > 0 for part in zip(*counts, strict=True)), "some plans end, some do not"


def test_a_custom_objective_reaches_its_state() -> None:
    # States 0 to 4 decode to 0, 10, ..., 40; action 1 moves to the next one. Stay as close to 20 as possible.
    next_state = [[state, min(state + 1, 4)] for state in range(5)]
    decoder = ToyTask(next_state, [[1, 1]] * 5, [[0, 0]] * 5)
    values = torch.cat([torch.arange(5.0)[None] * 10, VALUES[1:]])

    def near_20(candidates: Candidates) -> Tensor:
        return -(candidates.states[..., 0] - 20).abs().sum(dim=2)

    config = SearchConfig(beam_width=16, expansion=8, horizon=5, action=Sampler())
    noise = Noise(torch.tensor([0]))
    found = beam_search(decoder, torch.tensor([[0]]), near_20, bins=Bins(TOY, values), config=config, noise=noise)
    assert found.best[0, 3::4].tolist() == [1, 2, 2, 2]  # the states after the current one
    assert float(found.scores[0, 0]) == -(20 + 10)


class RiskyTask(ToyTask):
    """One step: action 0 earns 1, action 1 earns 20 or -1 with equal probability."""

    def __init__(self) -> None:
        super().__init__([[0, 0]] * 5, [[2, 4]] * 5, [[0, 0]] * 5)

    def _options(self, row: list[int]) -> list[int]:
        return [0, 4] if len(row) % 4 == 2 and row[-1] == 1 else super()._options(row)


def test_a_low_percentile_avoids_a_risky_action() -> None:
    config = SearchConfig(beam_width=8, expansion=4, horizon=1, action=Sampler())

    def search(percentile: float | None) -> Plan:
        return beam_search(
            RiskyTask(),
            torch.tensor([[0]]),
            discounted_return(0.5),
            bins=Bins(TOY, VALUES),
            config=config,
            noise=Noise(torch.tensor([0])),
            percentile=percentile,
        )

    for percentile, action, score in ((None, 1, 9.5), (0.3, 0, 1.0), (0.7, 1, 20.0)):
        found = search(percentile)
        assert int(found.best[0, 0]) == action
        assert float(found.scores[0, 0]) == pytest.approx(score)


@pytest.mark.parametrize("kind", [NaiveDecoder, CachedDecoder])
def test_the_most_likely_rewards_do_not_mislead_the_search(kind: type[NaiveDecoder] | type[CachedDecoder]) -> None:
    decoder = kind(lottery_model().gpt)
    action, score = first_choice(decoder, SearchConfig().reward)
    assert action == SAFE and score == pytest.approx(11.0, abs=0.3)
    # Sampled reward tokens show the value of a winning draw, which no action can choose.
    action, score = first_choice(decoder, Sampler())
    assert action == LOTTERY and score > 15.0


def test_the_first_action_of_an_episode_has_its_own_sampler() -> None:
    layout = SHAPES["rewards"]
    gpt = random_gpt(layout, 4, 0)
    bins = Bins(layout, torch.zeros(layout.size, gpt.num_bins))
    config = SearchConfig(beam_width=16, expansion=1, horizon=1, action=Sampler(top_k=1), first_action=Sampler())

    def num_actions(config: SearchConfig, *, first_step: bool) -> int:
        found = beam_search(
            NaiveDecoder(gpt),
            torch.tensor([[0, 1]]),
            log_likelihood,
            bins=bins,
            config=config,
            noise=Noise(torch.tensor([0])),
            first_step=first_step,
        )
        return len({tuple(row) for row in found.tokens[0, :, : layout.action_dim].tolist()})

    assert num_actions(config, first_step=True) > 5
    assert num_actions(config, first_step=False) == 1
    assert num_actions(replace(config, first_action=None), first_step=True) == 1
