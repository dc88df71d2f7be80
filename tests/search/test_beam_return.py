"""Planning for return: on a toy task whose optimum is known, and decoder against decoder."""

import itertools

import numpy as np
import pytest
import torch
from torch import Tensor

from trajectory_transformer.config import ModelConfig, SearchConfig
from trajectory_transformer.gpu.backends import make_decoder
from trajectory_transformer.model.gpt import GPT
from trajectory_transformer.search.beam import Plan, beam_search
from trajectory_transformer.search.decoder import StepwiseDecoder
from trajectory_transformer.search.objectives import discounted_return, log_likelihood
from trajectory_transformer.search.sampling import Noise
from trajectory_transformer.tokens.layout import TokenLayout

CPU = torch.device("cpu")
TOY = TokenLayout(goal_dim=0, observation_dim=1, action_dim=1, rewards=True)
NUM_STATES = 5
STOP = NUM_STATES
VALUES = torch.tensor([[0.0, 1.0, 2.0, 3.0, 4.0]] * 2 + [[-1.0, 0.0, 1.0, 5.0, 20.0]] + [[0.0, 1.0, 2.0, 3.0, 10.0]])


class ToyTask(StepwiseDecoder):
    """A deterministic task as a decoder: tables say what follows a state and an action (0 or 1, equally likely).

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
        last = row[len(row) - slot :]  # the transition under way
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
    config = SearchConfig(beam_width=width, expansion=8, horizon=horizon, action_nucleus=None)
    return beam_search(
        decoder,
        torch.tensor([[start]]),
        discounted_return(discount),
        layout=TOY,
        values=VALUES,
        config=config,
        noise=Noise(torch.tensor([3])),
    )


def exhaustive(decoder: ToyTask, start: int, horizon: int, discount: float) -> tuple[float, list[int]]:
    """The best actions by trying all, rewards and last value by hand."""
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
    """What a plan is worth by the tables; after an end the tokens of actions are stops and count nothing."""
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


def test_the_discount_decides_between_soon_and_much() -> None:
    # Action 1 pays 5 now and nothing later; action 0 pays 0 now and 20 one step later.
    next_state = [[1, 2], [1, 1], [2, 2], [3, 3], [4, 4]]
    reward = [[1, 3], [4, 4], [1, 1], [1, 1], [1, 1]]
    value = [[0, 0]] * 5
    decoder = ToyTask(next_state, reward, value)
    patient, hasty = (plan(decoder, 0, width=8, horizon=2, discount=discount) for discount in (0.9, 0.1))
    assert actions_of(patient.best[0], 1) == [0]
    assert float(patient.scores[0, 0]) == pytest.approx(0.0 + 0.9 * 20)
    assert actions_of(hasty.best[0], 1) == [1]
    assert float(hasty.scores[0, 0]) == pytest.approx(5.0)


def test_values_reach_beyond_the_horizon() -> None:
    # Rewards do not differ, the return-to-go does: 1 for action 0, 10 for action 1.
    decoder = ToyTask([[0, 0]] * 5, [[1, 1]] * 5, [[1, 4]] * 5)
    found = plan(decoder, 0, width=4, horizon=1)
    assert actions_of(found.best[0], 1) == [1]
    assert float(found.scores[0, 0]) == pytest.approx(0.0 + 0.5 * 10.0)


def test_a_predicted_end_is_not_chased_past() -> None:
    # Action 1 ends the task, and a deluded model promises reward 20 for ever after; action 0 earns 1 a step.
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
    # 4 layouts x 3 windows x 12 seeds x 8 environments: 1,152 prompts, with stop tokens among them.
    layout = SHAPES[name]
    objective = discounted_return(0.9) if layout.rewards else log_likelihood
    for seed in range(12):
        gpt = random_gpt(layout, window, seed)
        rng = torch.Generator().manual_seed(seed)
        past = seed % window
        prompt = torch.randint(8, (8, layout.length(past) + layout.observation_dim), generator=rng)
        values = torch.randn(layout.size, 7, generator=rng)
        config = SearchConfig(beam_width=5, expansion=2, horizon=horizon, observation_top_k=None, temperature=0.8)
        plans = [
            beam_search(
                make_decoder(decoder, gpt),
                prompt,
                objective,
                layout=layout,
                values=values,
                config=config,
                noise=Noise(torch.arange(8)),
            )
            for decoder in ("naive", "cached")
        ]
        assert torch.equal(plans[0].tokens, plans[1].tokens), seed
        torch.testing.assert_close(plans[0].scores, plans[1].scores, atol=1e-4, rtol=1e-4)


def test_a_plan_does_not_depend_on_its_neighbours() -> None:
    layout = SHAPES["rewards"]
    gpt = random_gpt(layout, 4, 0)
    prompts = torch.randint(7, (3, layout.observation_dim), generator=torch.Generator().manual_seed(0))
    values = torch.randn(layout.size, 7, generator=torch.Generator().manual_seed(1))

    def search(rows: list[int]) -> Tensor:
        noise = Noise(torch.tensor([50 + row for row in rows]))
        config = SearchConfig(beam_width=4, horizon=4)
        decoder = make_decoder("cached", gpt)
        return beam_search(
            decoder, prompts[rows], discounted_return(0.9), layout=layout, values=values, config=config, noise=noise
        ).tokens

    together = search([0, 1, 2])
    for row in range(3):
        assert torch.equal(search([row])[0], together[row])


def test_copies_of_a_good_start_do_not_crowd_out_what_pays_later() -> None:
    # As above, but with room for two candidates only: the hasty one and the patient one.
    next_state = [[1, 2], [1, 1], [2, 2], [3, 3], [4, 4]]
    decoder = ToyTask(next_state, [[1, 3], [4, 4], [1, 1], [1, 1], [1, 1]], [[0, 0]] * 5)
    found = plan(decoder, 0, width=2, horizon=2, discount=0.9)
    assert actions_of(found.best[0], 1) == [0]
