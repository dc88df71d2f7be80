"""The probabilistic ensemble of PETS (Chua et al., 2018): Gaussian networks and trajectory sampling.

Each network predicts the mean and the variance of the change of the state, and with `rewards` also of the reward. The
variance is the noise of the system (aleatoric uncertainty). The networks disagree where there is little data (epistemic
uncertainty).

Differences from the authors' code: the targets are normalised like the inputs, the bounds of the log-variance belong to
one network each, and a network keeps the weights with its smallest held-out loss (as in MBPO, Janner et al., 2019).
"""

from trajectory_transformer.config import EnsembleConfig
from trajectory_transformer.pets.behaviour import Behaviour, fit_behaviour
from trajectory_transformer.pets.ensemble import Ensemble, EnsemblePrediction
from trajectory_transformer.pets.fit import EnsembleMetrics, fit
from trajectory_transformer.pets.networks import GaussianNetworks

__all__ = [
    "Behaviour",
    "Ensemble",
    "EnsembleConfig",
    "EnsembleMetrics",
    "EnsemblePrediction",
    "GaussianNetworks",
    "fit",
    "fit_behaviour",
]
