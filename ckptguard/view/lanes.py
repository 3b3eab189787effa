"""Tasks that a few threads share: one lane per source, taken in turn, so that no node or disk waits for another's."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Hashable, Iterator

Task = Callable[[], None]


class Lanes:
    """Tasks, some of which make further ones. Thread-safe."""

    def __init__(self) -> None:
        self._lanes: dict[Hashable, deque[Iterator[Task]]] = {}
        self._turns: deque[Hashable] = deque()
        self._running = 0
        self._stopped = False
        self._changed = threading.Condition()

    def add(self, lane: Hashable, tasks: Iterator[Task], *, first: bool = False) -> None:
        """Puts tasks at the end of a lane, or before all others of it. They are made when they are taken."""
        with self._changed:
            if lane not in self._lanes:
                self._lanes[lane] = deque()
                self._turns.append(lane)
            if first:
                self._lanes[lane].appendleft(tasks)
            else:
                self._lanes[lane].append(tasks)
            self._changed.notify_all()

    def stop(self) -> None:
        """No task is taken any more."""
        with self._changed:
            self._stopped = True
            self._changed.notify_all()

    @property
    def stopped(self) -> bool:
        """Whether it was stopped."""
        return self._stopped

    def work(self) -> None:
        """Does tasks until none is left and none runs that could make more. An exception stops all lanes, and is raised."""
        while (task := self._take()) is not None:
            try:
                task()
            except BaseException:
                self.stop()
                raise
            finally:
                with self._changed:
                    self._running -= 1
                    self._changed.notify_all()

    def _take(self) -> Task | None:
        with self._changed:
            while not self._stopped:
                task = self._next()
                if task is not None:
                    self._running += 1
                    return task
                if not self._running:
                    return None
                self._changed.wait()
        return None

    def _next(self) -> Task | None:
        for _ in range(len(self._turns)):
            lane = self._lanes[self._turns[0]]
            self._turns.rotate(-1)
            while lane:
                task = next(lane[0], None)
                if task is not None:
                    return task
                lane.popleft()
        return None
