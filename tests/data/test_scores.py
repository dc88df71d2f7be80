"""Reference returns and the normalised score."""

import pytest

from trajectory_transformer.data.scores import normalized_score, reference_returns


def test_scores_are_0_for_the_random_and_100_for_the_expert_policy_in_any_version() -> None:
    assert normalized_score("Hopper-v5", -20.272305) == 0.0
    assert normalized_score("Hopper-v4", 3234.3) == 100.0
    assert normalized_score("Hopper-v5", 1677.4) == pytest.approx(52.16, abs=0.01)
    assert normalized_score("HalfCheetah-v5", 5428.0) == pytest.approx(45.98, abs=0.01)


def test_tasks_without_reference_are_refused_by_name() -> None:
    assert reference_returns("Humanoid-v5") is None
    with pytest.raises(ValueError, match="no reference returns are known for 'Humanoid-v5', only for hopper"):
        normalized_score("Humanoid-v5", 1.0)
