"""What a perfect predictor would reach in the humanoid experiment: futures of the policy itself, in the simulator.

    python benchmarks/humanoid_ceiling.py --policies DIR --study results/prediction/humanoid_eight_starts_seed0.json

The reference episodes of `humanoid.py` are played, and from every start further visits with noise of their own
(`--samples`). These take the place of the futures that a predictor samples: `simulator` in the result. For
`simulator_binned`, each future has the noise of one of these visits but begins at a state drawn from the bins of the
start's values: a perfect predictor that reads the start as tokens, and nothing before it. Bins are those of a result
file of `tt study` on the same data. Writes <out>/humanoid_ceiling.json.
"""

import argparse
import functools
import json
import multiprocessing
import shlex
import sys
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from itertools import chain
from pathlib import Path

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).parents[1]))
from benchmarks.humanoid_data import play_from_bins, play_visits
from benchmarks.humanoid_jobs import basic_parser, reference_options
from trajectory_transformer.analysis.likelihood import Edges, Futures
from trajectory_transformer.analysis.predictors import Past
from trajectory_transformer.analysis.study import StudyConfig, find_starts, oracle_of, run_study
from trajectory_transformer.analysis.summary import curve_of, study_metrics
from trajectory_transformer.data.episode import DoubleArray, Episode, FloatArray
from trajectory_transformer.results import write_result

_AT_A_TIME = 50  # episodes that a process plays


class PlayedFutures:
    """A predictor whose futures are episodes that were played from each start, told apart by the start's state."""

    def __init__(self, played: Mapping[bytes, tuple[Sequence[Episode], int]]) -> None:
        """By the bytes of the state of a start: episodes, and the step at which they come to it."""
        self._played = played

    def predict(
        self, state: FloatArray, past: Past, actions: FloatArray | None, steps: int, samples: int, *, seed: int = 0
    ) -> Futures:
        """The states after each start; an episode that is over has ended."""
        assert actions is None, "the policy chose its actions"
        del past, seed
        states = np.full((len(state), samples, steps, state.shape[1]), np.nan)
        ended = np.ones(states.shape[:3], dtype=np.bool_)
        for row, start in enumerate(state):
            episodes, begun = self._played[start.tobytes()]
            for sample, episode in enumerate(episodes):
                after = episode.observations[begun + 1 : begun + 1 + steps]
                states[row, sample, : len(after)], ended[row, sample, : len(after)] = after, False
        return Futures(states, ended)

    def log_prob(self, state: FloatArray, past: Past, action: FloatArray, next_state: FloatArray) -> DoubleArray:
        """Not known."""
        raise NotImplementedError


def play(options: argparse.Namespace, edges: Edges) -> tuple[list[list[Episode]], list[list[Episode]]]:
    """Episodes of every start: its visits, references first, and those that begin in its bins."""
    count = options.visits + options.samples
    from_bins = functools.partial(play_from_bins, edges=edges)
    with ProcessPoolExecutor(
        options.workers, multiprocessing.get_context("spawn"), torch.set_num_threads, (1,)
    ) as pool:
        waiting = [
            [pool.submit(play, options, start, part) for part in _parts(first, count)]
            for play, first in ((play_visits, 0), (from_bins, options.visits))
            for start in range(options.starts)
        ]
        began, total = time.monotonic(), sum(map(len, waiting))
        for done, _ in enumerate(as_completed(chain.from_iterable(waiting)), 1):
            left = (time.monotonic() - began) / done * (total - done)
            print(f"{done} of {total} parts played, {left:.0f} s left", flush=True)
    played = [[episode for part in parts for episode in part.result()] for parts in waiting]
    return played[: options.starts], played[options.starts :]


def _parts(first: int, count: int) -> list[range]:
    """Visits from `first` on, in parts that one process plays."""
    return [range(begin, min(begin + _AT_A_TIME, count)) for begin in range(first, count, _AT_A_TIME)]


def main(arguments: Sequence[str] | None = None) -> int:
    """Play, measure and write."""
    parser = basic_parser(__doc__)
    reference_options(parser)
    parser.add_argument("--study", type=Path, required=True, help="result of tt study, whose bins are used")
    options = parser.parse_args(arguments)
    began = time.monotonic()
    stored = json.loads(options.study.read_text())
    bins = zip(stored["ranges"], stored["num_bins"], strict=True)
    edges = [np.linspace(low, high, count + 1) for (low, high), count in bins]
    visits, from_bins = play(options, edges)
    references = [episode for each in visits for episode in each[: options.visits]]
    starts = find_starts(references, count=options.starts, horizon=options.horizon, context=options.context, seed=0)
    groups = {start.state.tobytes(): (start.episode // options.visits, start.step) for start in starts}
    further = {key: (visits[group][options.visits :], step) for key, (group, step) in groups.items()}
    binned = {key: (from_bins[group], 0) for key, (group, _) in groups.items()}
    futures = {"simulator": PlayedFutures(further), "simulator_binned": PlayedFutures(binned)}
    config = StudyConfig(horizon=options.horizon, samples=options.samples)
    scale = np.concatenate([each.observations for each in references]).astype(np.float64).std(axis=0)
    found = run_study(futures, starts, edges, np.where(scale > 0, scale, 1.0), config)
    metrics = study_metrics(found) | {"oracle_logp": oracle_of(edges, starts)}
    path = options.out / "humanoid_ceiling.json"
    write_result(
        path,
        name="prediction humanoid ceiling",
        command="python " + shlex.join(sys.argv),
        device=torch.device("cpu"),
        seeds=[options.reference_seed + start for start in range(options.starts)],
        seconds=time.monotonic() - began,
        metrics=metrics,
        details={
            "curves": {name: curve_of(each) for name, each in found.items()},
            "starts": [{"episode": each.episode, "step": each.step, "visits": len(each.visited)} for each in starts],
        },
    )
    print(f"wrote {path}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
