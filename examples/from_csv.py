"""From a CSV log to a controller: read, train, plan.

python examples/from_csv.py        (writes log.csv in the current folder first)
"""

import csv
from pathlib import Path

import numpy as np

from trajectory_transformer import Columns, ModelConfig, Planner, TokenConfig, TrainConfig, load_dataset, train


def write_log(path: Path) -> None:
    """Log 50 runs of a heater that keeps a room near 20 degrees, switched by a noisy thermostat."""
    rng = np.random.default_rng(0)
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["run", "temperature", "power", "comfort"])
        for run in range(50):
            temperature = rng.uniform(10.0, 30.0)
            for _ in range(30):
                power = np.clip((20.0 - temperature) / 5.0 + rng.normal(0.0, 0.3), 0.0, 1.0)
                following = temperature + 3.0 * power - 0.1 * (temperature - 5.0)
                writer.writerow([run, f"{temperature:.3f}", f"{power:.3f}", f"{-abs(following - 20.0):.3f}"])
                temperature = following


def main() -> None:
    """Train on the log, and choose the power for a cold and for a warm room."""
    write_log(Path("log.csv"))
    columns = Columns(episode="run", observations=("temperature",), actions=("power",), reward="comfort")
    dataset = load_dataset("log.csv", columns)
    sizes, settings = (
        ModelConfig(window=4, num_layers=1, width=32),
        TrainConfig(steps=600, batch_size=64, learning_rate=3e-3),
    )
    model = train(dataset, tokens=TokenConfig(num_bins=20), model=sizes, train=settings)
    planner = Planner(model)
    for temperature in (12.0, 26.0):
        planner.reset()
        action = planner.act([temperature])
        print(f"at {temperature:.0f} degrees: power {action[0]:.1f}")


if __name__ == "__main__":
    main()
