"""A buddy allocator, which the paper gives to the contiguous systems (section 6.1)."""


class BuddyAllocator:
    """Hands out runs of slots whose sizes are powers of two.

    A block of size 2^k begins at a multiple of 2^k; halves of one block are
    buddies and become one again when both are free. Memory that is no power of
    two is the sum of several, largest first, which the same rule keeps apart.
    """

    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots
        self.num_free = num_slots
        self._free: list[set[int]] = [set() for _ in range(num_slots.bit_length())]
        self._order_of: dict[int, int] = {}
        start = 0
        for order in reversed(range(num_slots.bit_length())):
            if num_slots >> order & 1:
                self._free[order].add(start)
                start += 1 << order

    def allocate(self, size: int) -> int | None:
        """Where a free run of at least `size` slots begins, from now on taken; None if none is."""
        order = (size - 1).bit_length()
        found = next((k for k in range(order, len(self._free)) if self._free[k]), None)
        if found is None:
            return None
        start = min(self._free[found])
        self._free[found].remove(start)
        for k in reversed(range(order, found)):
            self._free[k].add(start + (1 << k))
        self._order_of[start] = order
        self.num_free -= 1 << order
        return start

    def size(self, start: int) -> int:
        """Slots of the run that was allocated at `start`."""
        return 1 << self._order_of[start]

    def free(self, start: int) -> None:
        """Takes a run back and joins it with its buddy as often as that is free."""
        order = self._order_of.pop(start)
        self.num_free += 1 << order
        while (buddy := start ^ (1 << order)) in self._free[order]:
            self._free[order].remove(buddy)
            start = min(start, buddy)
            order += 1
        self._free[order].add(start)

    def check(self) -> None:
        """Asserts that free and taken runs partition the memory, and that all joins are made."""
        runs = [(start, 1 << order) for start, order in self._order_of.items()]
        for order, starts in enumerate(self._free):
            for start in starts:
                assert start ^ (1 << order) not in starts, "two free buddies were not joined"
                runs.append((start, 1 << order))
        end = 0
        for start, size in sorted(runs):
            assert start == end, "runs overlap or leave a gap"
            assert start % size == 0, "a run is not aligned to its size"
            end += size
        assert end == self.num_slots
        assert self.num_free == sum(len(s) << order for order, s in enumerate(self._free))
