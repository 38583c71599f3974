"""The cases that a seed gives: the first of every law of a domain of each book.

A process that draws them imports only what drawing needs.
"""

import hashlib

from properties.books import book_of
from properties.layers.domain import LayerDomain
from properties.modules.domain import ModuleDomain
from properties.paths.domain import PathDomain
from properties.pools.domain import PoolDomain
from properties.rules.domain import Domain
from properties.traces.domain import TraceDomain
from properties.words.sizes import MOST, sized
from verify.engine.drawing import of_law

CASES = 6  # of each law and domain
DOMAINS = (Domain(), ModuleDomain(), ModuleDomain("gated_rms_norm"), LayerDomain(), PoolDomain(), PathDomain(), TraceDomain())


def lines(seed: int) -> list[tuple[str, str]]:
    """The first cases of every law of the domains."""
    found: list[tuple[str, str]] = []
    for domain in DOMAINS:
        book = book_of(domain)
        for name in book.about(domain.operation):
            law = book.laws[name]
            if law.needs(domain) is None:
                of_law(
                    law, sized(domain, 64, MOST["quick"]), seed, CASES, lambda example, name=name: found.append(f"{name} {example}")
                )
    return found


def digest(found: list[tuple[str, str]]) -> str:
    return f"{len(found)} {hashlib.sha256(str(found).encode()).hexdigest()}"
