"""What a perfect predictor would reach in the humanoid experiment: futures of the policy itself, in the simulator.

    python benchmarks/humanoid_ceiling.py --policies DIR --study results/prediction/humanoid_eight_starts_seed0.json

The reference episodes of `humanoid.py` are played, and from every start further visits with noise of their own
(`--samples`). These take the place of the futures that a predictor samples. Bins are those of a result file of
`tt study` on the same data. Writes <out>/humanoid_ceiling.json.
"""

import argparse
import json
import multiprocessing
import shlex
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).parents[1]))
from benchmarks.humanoid_data import play_visits
from benchmarks.humanoid_jobs import basic_parser, reference_options
from trajectory_transformer.analysis.likelihood import Futures
from trajectory_transformer.analysis.predictors import Past
from trajectory_transformer.analysis.study import StudyConfig, find_starts, oracle_of, run_study
from trajectory_transformer.analysis.summary import curve_of, study_metrics
from trajectory_transformer.data.episode import DoubleArray, Episode, FloatArray
from trajectory_transformer.results import write_result

_VISITS_AT_A_TIME = 50


class PlayedFutures:
    """A predictor whose futures are episodes that were played from each start, told apart by the start's state."""

    def __init__(self, played: dict[bytes, list[Episode]], steps: dict[bytes, int]) -> None:
        """Episodes by the bytes of the state of their start, and the steps at which they come to it."""
        self._played, self._steps = played, steps

    def predict(
        self, state: FloatArray, past: Past, actions: FloatArray | None, steps: int, samples: int, *, seed: int = 0
    ) -> Futures:
        """The states after each start; an episode that is over has ended."""
        assert actions is None, "the policy chose its actions"
        del past, seed
        states = np.full((len(state), samples, steps, state.shape[1]), np.nan)
        ended = np.ones(states.shape[:3], dtype=np.bool_)
        for row, start in enumerate(state):
            first = self._steps[start.tobytes()] + 1
            for sample, episode in enumerate(self._played[start.tobytes()]):
                after = episode.observations[first : first + steps]
                states[row, sample, : len(after)], ended[row, sample, : len(after)] = after, False
        return Futures(states, ended)

    def log_prob(self, state: FloatArray, past: Past, action: FloatArray, next_state: FloatArray) -> DoubleArray:
        """Not known."""
        raise NotImplementedError


def play(options: argparse.Namespace) -> list[list[Episode]]:
    """References and then further visits of every start."""
    count = options.visits + options.samples
    parts = [range(first, min(first + _VISITS_AT_A_TIME, count)) for first in range(0, count, _VISITS_AT_A_TIME)]
    jobs = [(start, part) for start in range(options.starts) for part in parts]
    found: dict[tuple[int, int], list[Episode]] = {}
    began = time.monotonic()
    with ProcessPoolExecutor(
        options.workers, multiprocessing.get_context("spawn"), torch.set_num_threads, (1,)
    ) as pool:
        waiting = {pool.submit(play_visits, options, start, part): (start, part.start) for start, part in jobs}
        for done in as_completed(waiting):
            found[waiting[done]] = done.result()
            left = (time.monotonic() - began) / len(found) * (len(jobs) - len(found))
            print(f"{len(found)} of {len(jobs)} parts played, {left:.0f} s left", flush=True)
    return [[each for part in parts for each in found[start, part.start]] for start in range(options.starts)]


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
    played = play(options)
    references = [episode for each in played for episode in each[: options.visits]]
    starts = find_starts(references, count=options.starts, horizon=options.horizon, context=options.context, seed=0)
    own = {start.state.tobytes(): played[start.episode // options.visits][options.visits :] for start in starts}
    futures = PlayedFutures(own, {start.state.tobytes(): start.step for start in starts})
    config = StudyConfig(horizon=options.horizon, samples=options.samples)
    scale = np.concatenate([each.observations for each in references]).astype(np.float64).std(axis=0)
    found = run_study({"simulator": futures}, starts, edges, np.where(scale > 0, scale, 1.0), config)
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
            "curves": {"simulator": curve_of(found["simulator"])},
            "starts": [{"episode": each.episode, "step": each.step, "visits": len(each.visited)} for each in starts],
        },
    )
    print(f"wrote {path}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
