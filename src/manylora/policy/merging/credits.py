"""dLoRA's credits (Algorithm 3): what each adapter has waited for others, and they for it.

In whole microseconds of one request held back, so that what one pays another gets, to the last one. Owns credits;
does not know why a request is held back.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

from manylora.types import AdapterId

MICROSECONDS = 1_000_000


class Credits:
    """By adapter; the base has credits like one.

    ``starve_s``: an adapter of which a whole batch, ``batch`` requests, is held back for so long has gained
    ``margin`` and starves, until it has paid half of that back. All start with twice the margin, which is what an
    adapter can pay.
    """

    def __init__(self, starve_s: float, batch: int) -> None:
        self.margin = int(starve_s * MICROSECONDS) * batch
        self.start = 2 * self.margin
        self.left_over = 0
        """What adapters that are gone had beyond ``start``: with it all sums to ``start`` for each adapter."""
        self._credits: dict[AdapterId, int] = {}
        self._starving: set[AdapterId] = set()

    def of(self, adapter: AdapterId) -> int:
        return self._credits.get(adapter, self.start)

    def all(self) -> dict[AdapterId, int]:
        """Of every adapter that ever paid or got any."""
        return self._credits

    def forget(self, adapter: AdapterId) -> None:
        """The adapter is gone."""
        self.left_over += self.of(adapter) - self.start
        self._credits.pop(adapter, None)
        self._starving.discard(adapter)

    def transfer(self, payers: Iterable[AdapterId], held_back: Collection[AdapterId], amount: int) -> None:
        """Each of ``held_back`` gets the amount: the first from the first payer, the second from the second.
        Where there are fewer payers, the first pays for the rest; without any, none is paid."""
        paying = list(payers)
        if not paying:
            return
        for place, adapter in enumerate(held_back):
            payer = paying[place] if place < len(paying) else paying[0]
            if payer != adapter:
                self._credits[payer] = self.of(payer) - amount
                self._credits[adapter] = self.of(adapter) + amount

    def starving(self) -> set[AdapterId]:
        """Adapters whose requests go first."""
        for adapter, credit in self._credits.items():
            if adapter in self._starving:
                if credit < self.start + self.margin // 2:
                    self._starving.remove(adapter)
            elif credit > self.start + self.margin:
                self._starving.add(adapter)
        return self._starving
