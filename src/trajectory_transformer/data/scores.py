"""Reference returns of the benchmark tasks, and the score that puts their returns on one scale."""

# Mean returns of a random and of an expert policy, as D4RL published them for the first versions of these tasks.
REFERENCE_RETURNS: dict[str, tuple[float, float]] = {
    "hopper": (-20.272305, 3234.3),
    "halfcheetah": (-280.178953, 12135.0),
    "walker2d": (1.629008, 4592.3),
    "ant": (-325.6, 3879.7),
}


def reference_returns(env_id: str) -> tuple[float, float] | None:
    """Returns of a random and an expert policy in an environment of any version; None where they are not known."""
    return REFERENCE_RETURNS.get(env_id.rpartition("/")[2].partition("-")[0].lower())


def normalized_score(env_id: str, episode_return: float) -> float:
    """100 for the expert, 0 for the random policy."""
    known = reference_returns(env_id)
    if known is None:
        raise ValueError(f"no reference returns are known for {env_id!r}, only for {', '.join(REFERENCE_RETURNS)}")
    random, expert = known
    return 100.0 * (episode_return - random) / (expert - random)
