"""A time limit of a search: it becomes narrower, or ends early with the best plan so far, instead of being late.

The time is looked at between two steps of a search. How long a step of a width takes at best is known from the steps
before it; how much slower the machine is at the moment, from the slowest of the last steps of any width.
"""

import time
from collections import deque
from collections.abc import Callable

_RECENT = 20  # steps by which the load of the machine is judged
_MARGIN = 1.25  # a step may take this much longer than expected
_RESERVED = 0.05  # share of the time for what follows the search: the copy of the plan, the decoded action


class Deadline:
    """Widths of the steps of a search, so that it ends in time."""

    def __init__(self, seconds: float, clock: Callable[[], float] = time.perf_counter) -> None:
        """Limit searches to a time."""
        self.seconds = seconds
        self.shortened = False  # whether the last search was narrower or shorter than asked for
        self._clock = clock
        self._fastest: dict[int, float] = {}  # seconds of the fastest step, by width
        self._slowdown: deque[float] = deque(maxlen=_RECENT)  # time of the last steps over that of the fastest
        self._end = self._mark = clock()
        self._running: int | None = None  # width of the step in progress

    @property
    def left(self) -> float:
        """Seconds to the end of the search."""
        return self._end - self._clock()

    def begin(self, share: float = 1.0) -> None:
        """Start a search, with a share of the time that is left to it and to those that follow."""
        self._mark = self._clock()
        self._end = self._mark + self.seconds * share * (1 - _RESERVED)
        self._running = None
        self.shortened = False

    def width(self, wanted: int, num_steps: int) -> int:
        """Width of the next of `num_steps` steps, at most `wanted`; 0 if not even the narrowest would be in time."""
        self._note()
        now = self._mark
        left = self._end - now
        chosen = wanted
        while chosen and self._cost(chosen) * num_steps > left:
            chosen //= 2
        if not chosen and self._cost(1) <= left:
            chosen = 1  # the plan becomes shorter instead
        self.shortened |= chosen < wanted
        self._running = chosen or None
        return chosen

    def finish(self) -> None:
        """Note how long the last step took."""
        self._note()
        self._running = None

    def forget_load(self) -> None:
        """Forget that the last steps were slow: the first call of anything is."""
        self._slowdown.clear()

    def _note(self) -> None:
        """Note the time of the step that has just ended."""
        now = self._clock()
        if self._running is not None:
            seconds = max(now - self._mark, 1e-9)
            fastest = min(seconds, self._fastest.get(self._running, seconds))
            self._fastest[self._running] = fastest
            self._slowdown.append(seconds / fastest)
        self._mark = now

    def _cost(self, width: int) -> float:
        """Seconds that a step of a width may take; 0 if nothing is known."""
        if not self._fastest:
            return 0.0
        # A step takes as long as the narrowest known one that is as wide, or longer in proportion.
        known = min((each for each in self._fastest if each >= width), default=max(self._fastest))
        seconds = self._fastest[known] * max(width / known, 1.0)
        return _MARGIN * seconds * max(self._slowdown, default=1.0)
