"""Which token of a sequence holds what: an optional goal, then `s.. a.. [r v]` for each transition."""

from dataclasses import dataclass


@dataclass(frozen=True)
class TokenLayout:
    """Slots of one sequence. A *slot* is a token's place in a transition; goal tokens precede all transitions."""

    goal_dim: int  # G, goal tokens at the front; 0 for none
    observation_dim: int  # O
    action_dim: int  # A
    rewards: bool  # whether each transition ends with a reward and a value slot
    map_shape: tuple[int, ...] = ()  # [C, H, W] of the map of an episode; () for none

    def __post_init__(self) -> None:
        """Refuse a transition without state or action."""
        object.__setattr__(self, "map_shape", tuple(self.map_shape))  # a list if it was read from JSON
        sizes = self.map_shape
        if sizes and not (len(sizes) == 3 and all(isinstance(size, int) and size >= 1 for size in sizes)):
            raise ValueError(f"the shape of a map must be 3 sizes of at least 1, got {list(sizes)}")
        dims = (self.observation_dim, self.action_dim, self.goal_dim)
        if any(type(size) is not int for size in dims):
            raise ValueError(f"the sizes of a layout must be whole numbers, got {list(dims)}")
        if self.observation_dim < 1 or self.action_dim < 1 or self.goal_dim < 0:
            raise ValueError(
                "a layout needs at least 1 observation and 1 action dimension and no negative goal, "
                f"got {self.observation_dim}, {self.action_dim} and {self.goal_dim}"
            )

    @property
    def size(self) -> int:
        """D, the slots of one transition."""
        return self.observation_dim + self.action_dim + 2 * self.rewards

    @property
    def observation(self) -> slice:
        """Slots of the state."""
        return slice(0, self.observation_dim)

    @property
    def action(self) -> slice:
        """Slots of the action."""
        return slice(self.observation_dim, self.observation_dim + self.action_dim)

    @property
    def reward(self) -> int:
        """Slot of the reward."""
        assert self.rewards, "a layout without rewards has no reward slot"
        return self.size - 2

    @property
    def value(self) -> int:
        """Slot of the return-to-go."""
        assert self.rewards, "a layout without rewards has no value slot"
        return self.size - 1

    def slot(self, position: int) -> int:
        """Slot of the token at a position of a sequence. Goal tokens have no slot."""
        assert position >= self.goal_dim, f"position {position} belongs to the goal"
        return (position - self.goal_dim) % self.size

    def readable(self, start: int, end: int) -> list[bool]:
        """Which positions in [start, end) other tokens may attend to: all but the values.

        A value token is the return that followed, known only in hindsight. If later tokens could read it, training
        would leak the future that planning lacks.
        """
        return [
            not (self.rewards and position >= self.goal_dim and self.slot(position) == self.value)
            for position in range(start, end)
        ]

    def length(self, transitions: int) -> int:
        """Tokens of a sequence of whole transitions, goal included."""
        return self.goal_dim + transitions * self.size
