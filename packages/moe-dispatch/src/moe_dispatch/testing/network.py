"""Memory of many ranks, with stores that take their time.

A store travels until somebody delivers it, and stores overtake each other as they like. Only a
signal has to wait: it arrives after all that its rank stored before it, wherever that went, and
signals of one kind between two ranks keep their order. That is what release and acquire at system
scope promise, and nothing more.
"""

import random
from collections import deque
from collections.abc import Callable
from typing import NamedTuple


class Store(NamedTuple):
    """A store on its way.

    Attributes:
        number: When it was made, among those of its rank.
        land: What happens when it arrives.
    """

    number: int
    land: Callable[[], None]


class Outbox:
    """What one rank has stored and others do not see yet."""

    def __init__(self, world_size: int):
        self.count = 0
        self.stores: list[Store] = []
        self.signals: list[deque[Store]] = [deque() for _ in range(world_size)]
        self.targets: list[int] = []  # whose queue is not empty

    def store(self, land: Callable[[], None]) -> None:
        """Send a store on its way."""
        self.count += 1
        self.stores.append(Store(self.count, land))

    def signal(self, target: int, land: Callable[[], None]) -> None:
        """Send a signal on its way, behind all stores so far."""
        self.count += 1
        if not self.signals[target]:
            self.targets.append(target)
        self.signals[target].append(Store(self.count, land))

    def __len__(self) -> int:
        return len(self.stores) + len(self.targets)

    def deliver_any(self, chance: random.Random) -> bool:
        """Deliver a store, or a signal that nothing holds back. Tell whether there was one."""
        if self.targets and chance.random() < 0.5 and self._deliver_signal(chance):
            return True
        if self.stores:
            _take(self.stores, chance).land()
            return True
        return self._deliver_signal(chance)

    def deliver_all(self) -> None:
        """Deliver everything, in order."""
        for store in self.stores:
            store.land()
        self.stores.clear()
        for target in self.targets:
            while self.signals[target]:
                self.signals[target].popleft().land()
        self.targets.clear()

    def _deliver_signal(self, chance: random.Random) -> bool:
        if not self.targets:
            return False
        place = chance.randrange(len(self.targets))
        target = self.targets[place]
        queue = self.signals[target]
        if any(store.number < queue[0].number for store in self.stores):
            return False
        queue.popleft().land()
        if not queue:
            self.targets[place] = self.targets[-1]
            self.targets.pop()
        return True


def _take(stores: list[Store], chance: random.Random) -> Store:
    """Remove any one, in no time."""
    index = chance.randrange(len(stores))
    store, stores[index] = stores[index], stores[-1]
    stores.pop()
    return store
