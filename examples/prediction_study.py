"""Which model foresees the four rooms best? Trains three predictors and compares them on held-out episodes.

python examples/prediction_study.py [EPISODES STEPS]
"""

import sys

from trajectory_transformer import ModelConfig, TokenConfig, TrainConfig, collect, train
from trajectory_transformer.analysis.predictors import EnsemblePredictor, Predictor, TransformerPredictor
from trajectory_transformer.analysis.protocol import study_dataset
from trajectory_transformer.analysis.study import StudyConfig
from trajectory_transformer.data.split import split_episodes
from trajectory_transformer.pets import EnsembleConfig, fit, fit_behaviour
from trajectory_transformer.report.prediction import Panel, likelihood_figure

HORIZON = 15


def main() -> None:
    """Collect, split, train, study; prints the log-likelihood after 1 step and at the end."""
    episodes, steps = (int(word) for word in sys.argv[1:3]) if len(sys.argv) > 2 else (300, 300)
    data, held_out = split_episodes(collect("tt/FourRooms-v0", "demonstrator", episodes=episodes), 0.1, seed=0)
    tokens = TokenConfig(discretizer="uniform", rewards=False)
    predictors: dict[str, Predictor] = {}
    for name, window in (("tt", 6), ("markov", 2)):
        model = ModelConfig(window=window, num_layers=2, width=64)
        settings = TrainConfig(steps=steps, batch_size=64, learning_rate=2e-3)
        predictors[name] = TransformerPredictor(train(data, tokens=tokens, model=model, train=settings))
    sizes = EnsembleConfig(num_networks=5, num_elites=5, num_layers=2, width=64, epochs=8)
    predictors["pets"] = EnsemblePredictor(fit(data, sizes), fit_behaviour(data, sizes))
    study = study_dataset(
        predictors, held_out, StudyConfig(horizon=HORIZON, samples=200), num_starts=12, context=5, actions=("policy",)
    )
    for name in predictors:
        first, last = (study.metrics[f"{name}_logp_{step}"] for step in (1, HORIZON))
        print(f"{name}: log-likelihood {first:.2f} after 1 step, {last:.2f} after {HORIZON}")
    print(f"oracle: {study.oracle:.2f}")
    likelihood_figure(Panel("four rooms", study.curves["policy"], study.oracle)).savefig("study.png", dpi=120)


if __name__ == "__main__":
    main()
