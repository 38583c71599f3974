"""Shards: a check divided over machines, so that each line is run by one of them, whatever runs where.

Nothing here imports torch.
"""

import dataclasses
import hashlib


@dataclasses.dataclass(frozen=True)
class Shard:
    """Shard `number` of `count`, from 1. A line's hash decides which shard owns it, so that no machine need know of another."""

    number: int = 1
    count: int = 1

    @classmethod
    def parse(cls, word: str) -> "Shard":
        """Parse "2/8". ValueError for anything else."""
        number, slash, count = word.partition("/")
        if not (slash and number.isdecimal() and count.isdecimal() and 1 <= int(number) <= int(count)):
            raise ValueError(f"must be a shard and how many there are, such as 2/8, got {word!r}")
        return cls(int(number), int(count))

    @property
    def whole(self) -> bool:
        """Whether there is no other shard."""
        return self.count == 1

    def owns(self, line: str) -> bool:
        """Whether this shard runs a line. What depends on the machine must not be in it (`Run.everywhere`)."""
        digest = hashlib.sha256(line.encode()).digest()
        return int.from_bytes(digest[:8]) % self.count == self.number - 1

    def __str__(self) -> str:
        return f"{self.number}/{self.count}"


WHOLE = Shard()
