"""Books: for each kind of thing that can be checked its cases, its domains and its laws. Laws of two books may share a name."""

import dataclasses
from typing import Any

from oracles.case import Case
from oracles.layer_case import LayerCase
from oracles.module_case import MODULES, ModuleCase
from oracles.operations import RULES
from oracles.parallel_case import ParallelCase
from oracles.pool_case import PoolCase
from properties.domain import Domain
from properties.laws import LAWS, Law
from properties.layers import LAYER_LAWS, LayerDomain
from properties.modules import MODULE_LAWS, ModuleDomain
from properties.paths import PATH_LAWS, PathDomain
from properties.pools import POOL_LAWS, PoolDomain


@dataclasses.dataclass(frozen=True)
class Book:
    """The laws of one kind of implementation: what its cases and domains are, and which operations they can be of."""

    name: str
    case: type[Any]
    domain: type[Any]
    laws: dict[str, Law]
    operations: tuple[str, ...]

    def about(self, operation: str) -> list[str]:
        """The laws that say something of an operation."""
        return [law.name for law in self.laws.values() if not law.about or operation in law.about]


BOOKS = (
    Book("rules", Case, Domain, LAWS, tuple(RULES)),
    Book("modules", ModuleCase, ModuleDomain, MODULE_LAWS, tuple(MODULES)),
    Book("paths", ParallelCase, PathDomain, PATH_LAWS, ("gdn_layer", "gated_delta_rule", "kda", "causal_conv1d")),
    Book("pools", PoolCase, PoolDomain, POOL_LAWS, ("decode",)),
    Book("layers", LayerCase, LayerDomain, LAYER_LAWS, ("gdn_layer",)),
)


def book_of(thing: object) -> Book:
    """The book of a case or a domain."""
    return next(book for book in BOOKS if isinstance(thing, book.case | book.domain))


def book_named(name: str) -> Book:
    """The book of that name."""
    return next(book for book in BOOKS if book.name == name)


def every_law() -> dict[str, Law]:
    """The laws of all books by name; of those that share one, the first book's."""
    laws: dict[str, Law] = {}
    for book in BOOKS:
        laws |= {name: law for name, law in book.laws.items() if name not in laws}
    return laws


def book_for(law: str, operation: str | None) -> Book:
    """The book of a line's law, about an operation if the line names one. ValueError lists the laws, or the operations."""
    books = [book for book in BOOKS if law in book.laws]
    if not books:
        raise ValueError(f"unknown law {law!r}; there are {', '.join(every_law())}")
    if operation is None:
        return books[0]
    for book in books:
        if operation in book.operations:
            return book
    choices = dict.fromkeys(name for book in books for name in book.operations)
    raise ValueError(f"op must be one of {', '.join(choices)} for law {law}, got {operation!r}")
