"""Reference returns and normalised scores."""

import pytest

from trajectory_transformer.data.scores import References, normalized_score, references_of


@pytest.mark.parametrize(
    ("env_id", "total_reward", "score"),
    [
        ("Hopper-v5", -20.272305, 0.0),
        ("Hopper-v4", 3234.3, 100.0),
        ("Hopper-v5", 1677.4, 52.16),
        ("HalfCheetah-v5", 5428.0, 45.98),
    ],
)
def test_scores_are_0_for_random_and_100_for_expert_in_any_version(
    env_id: str, total_reward: float, score: float
) -> None:
    references = references_of(env_id)
    assert references is not None
    assert normalized_score(total_reward, references) == pytest.approx(score, abs=0.01)


def test_references_in_the_metadata_take_precedence() -> None:
    own = {"ref_min_score": -10.0, "ref_max_score": 30}
    assert references_of("Hopper-v5", own) == References(-10.0, 30.0)
    assert references_of("MyRobot-v0", own) == References(-10.0, 30.0)


def test_unknown_tasks_have_no_references() -> None:
    assert references_of("Humanoid-v5") is None
    with pytest.raises(ValueError, match=r"must exceed that of the random policy, 3.0, got 3.0"):
        References(3.0, 3.0)
