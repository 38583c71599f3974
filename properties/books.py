"""Books: the cases, domains and laws of each kind of thing that can be checked. Two books may have laws of the same name."""

import dataclasses
from typing import Any

from oracles.operations import RULES
from properties.calls.case import CallCase
from properties.calls.domain import CallDomain
from properties.calls.laws import CALL_LAWS
from properties.calls.smaller import SMALLER_CALLS
from properties.laws.law import Law
from properties.layers.case import LAYERS, LayerCase
from properties.layers.domain import LayerDomain
from properties.layers.illegal import LAYER_INPUTS
from properties.layers.laws import LAYER_LAWS
from properties.layers.smaller import SMALLER_LAYERS
from properties.modules.case import MODULES, ModuleCase
from properties.modules.domain import ModuleDomain
from properties.modules.illegal import MODULE_INPUTS
from properties.modules.laws import MODULE_LAWS
from properties.modules.smaller import SMALLER_MODULES
from properties.paths.case import ParallelCase
from properties.paths.domain import OPERATIONS, PathDomain
from properties.paths.illegal import LAYOUT_INPUTS
from properties.paths.laws import PATH_LAWS
from properties.paths.smaller import SMALLER_PATHS
from properties.pools.case import PoolCase
from properties.pools.domain import PoolDomain
from properties.pools.illegal import POOL_INPUTS
from properties.pools.laws import POOL_LAWS
from properties.pools.smaller import SMALLER_POOLS
from properties.rules.case import Case
from properties.rules.domain import Domain
from properties.rules.illegal import RULE_INPUTS
from properties.rules.laws import LAWS
from properties.rules.smaller import SMALLER_RULES
from properties.traces.case import TraceCase
from properties.traces.domain import TraceDomain
from properties.traces.illegal import EVENT_INPUTS
from properties.traces.laws import TRACE_LAWS
from properties.traces.smaller import SMALLER_TRACES
from properties.words.illegal import NO_INPUTS, IllegalInputs
from properties.words.names import unknown
from properties.words.smaller import Smaller


@dataclasses.dataclass(frozen=True)
class Book:
    """Everything that belongs to one kind of implementation: cases, domains, laws, and the operations that it covers.

    `smaller` says how a case shrinks, and `illegal` which inputs are illegal. The compile keys of a case are in KEYS of its class.
    """

    name: str
    case: type[Any]
    domain: type[Any]
    laws: dict[str, Law]
    operations: tuple[str, ...]
    smaller: Smaller
    illegal: IllegalInputs = NO_INPUTS

    @property
    def base(self) -> Law | None:
        """The law that judges one call by the bounds of its case, if the book has one."""
        return next((law for law in self.laws.values() if law.base), None)

    def about(self, operation: str) -> list[str]:
        """Return the names of the laws that apply to an operation."""
        return [law.name for law in self.laws.values() if not law.about or operation in law.about]


BOOKS = (
    Book("rules", Case, Domain, LAWS, tuple(RULES), SMALLER_RULES, RULE_INPUTS),
    Book("modules", ModuleCase, ModuleDomain, MODULE_LAWS, tuple(MODULES), SMALLER_MODULES, MODULE_INPUTS),
    Book(
        "paths",
        ParallelCase,
        PathDomain,
        PATH_LAWS,
        OPERATIONS,
        SMALLER_PATHS,
        LAYOUT_INPUTS,
    ),
    Book("pools", PoolCase, PoolDomain, POOL_LAWS, ("decode",), SMALLER_POOLS, POOL_INPUTS),
    Book("layers", LayerCase, LayerDomain, LAYER_LAWS, tuple(LAYERS), SMALLER_LAYERS, LAYER_INPUTS),
    Book("traces", TraceCase, TraceDomain, TRACE_LAWS, ("serving",), SMALLER_TRACES, EVENT_INPUTS),
    Book("calls", CallCase, CallDomain, CALL_LAWS, ("call",), SMALLER_CALLS),
)


def book_of(thing: object) -> Book:
    """Return the book of a case or a domain."""
    return next(book for book in BOOKS if isinstance(thing, book.case | book.domain))


def book_named(name: str) -> Book:
    """Return the book with this name."""
    return next(book for book in BOOKS if book.name == name)


def every_law() -> dict[str, Law]:
    """Return the laws of all books by name; if books share a name, the first book's law."""
    laws: dict[str, Law] = {}
    for book in BOOKS:
        laws |= {name: law for name, law in book.laws.items() if name not in laws}
    return laws


def book_for(law: str, operation: str | None) -> Book:
    """Return the book of a line's law, for an operation if the line names one. ValueError lists the laws or the operations."""
    books = [book for book in BOOKS if law in book.laws]
    if not books:
        raise ValueError(unknown("law", law, every_law()))
    if operation is None:
        return books[0]
    for book in books:
        if operation in book.operations:
            return book
    choices = dict.fromkeys(name for book in books for name in book.operations)
    raise ValueError(f"op must be one of {', '.join(choices)} for law {law}, got {operation!r}")
