"""Profiles: how many cases a check runs of each law."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class Profile:
    """How much to check: `examples` a law (four times as many of the oracle's), and whether the default seed is fixed.

    `climbs`: half of the examples of laws that are judged by bounds are those that a climb of error over bound comes to.
    """

    name: str
    examples: int
    fixed_seed: bool = True
    climbs: bool = False

    def examples_of(self, law: str) -> int:
        """How many cases a law is asked about: the oracle law covers the widest space and has most."""
        return self.examples * (4 if law == "oracle" else 1)


PROFILES = {
    profile.name: profile
    for profile in (
        Profile("least", 2),
        Profile("few", 5),
        Profile("quick", 32),
        Profile("ci", 200),
        Profile("gpu", 200),
        Profile("soak", 3000, fixed_seed=False, climbs=True),
    )
}
