"""Profiles: how many cases of each law a check runs."""

import dataclasses
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # the command line imports this module before torch
    from properties.laws.law import Law

# With seed 0 and the profile quick, these first break `oracle` after its 96th case: of 144 wrong rules one, of 118 modules none, of
# 47 layers one, of 58 pools one. Another law finds each of the three.
BASE = 3


@dataclasses.dataclass(frozen=True)
class Profile:
    """How much to check: `examples` for each law, and BASE times as many for the base law of a book.

    `fixed_seed`: whether the default seed is always the same. `climbs`: half of the examples of a truth law are variations of the
    cases with the largest errors so far. `large`: whether some cases are large (properties/words/sizes.py).
    """

    name: str
    examples: int
    fixed_seed: bool = True
    climbs: bool = False
    large: bool = True

    def examples_of(self, law: "Law") -> int:
        """How many cases of a law are run. A base law covers the widest space and gets BASE times as many.

        A law with `few` gets a quarter, or `few` if that is more.
        """
        if law.few:
            return min(self.examples, max(law.few, self.examples // 4))
        return self.examples * (BASE if law.base else 1)


PROFILES = {
    profile.name: profile
    for profile in (
        Profile("least", 2, large=False),
        Profile("few", 5),
        Profile("quick", 32),
        Profile("ci", 200),
        Profile("gpu", 200),
        Profile("soak", 3000, fixed_seed=False, climbs=True),
    )
}
