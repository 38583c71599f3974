"""Books: the cases, domains and laws of each kind of thing that can be checked. Two books may have laws of the same name."""

import dataclasses
from typing import Any

from oracles.operations import RULES
from properties.call_domain import CallDomain
from properties.call_laws import CALL_LAWS
from properties.cases.call_case import CallCase
from properties.cases.layer_case import LAYERS, LayerCase
from properties.cases.module_case import MODULES, ModuleCase
from properties.cases.path_case import ParallelCase
from properties.cases.pool_case import PoolCase
from properties.cases.rule_case import Case
from properties.cases.trace_case import TraceCase
from properties.domain import Domain
from properties.illegal_events import EVENT_INPUTS
from properties.illegal_inputs import MODULE_INPUTS, NO_INPUTS, RULE_INPUTS, IllegalInputs
from properties.illegal_layers import LAYER_INPUTS
from properties.illegal_layouts import LAYOUT_INPUTS
from properties.illegal_pools import POOL_INPUTS
from properties.laws import Law
from properties.layer_domain import LayerDomain
from properties.layer_laws import LAYER_LAWS
from properties.module_domain import ModuleDomain
from properties.module_laws import MODULE_LAWS
from properties.names import unknown
from properties.path_domain import OPERATIONS, PathDomain
from properties.path_laws import PATH_LAWS
from properties.pool_domain import PoolDomain
from properties.pool_laws import POOL_LAWS
from properties.rule_laws import LAWS
from properties.smaller import (
    SMALLER_CALLS,
    SMALLER_LAYERS,
    SMALLER_MODULES,
    SMALLER_PATHS,
    SMALLER_POOLS,
    SMALLER_RULES,
    SMALLER_TRACES,
    Smaller,
)
from properties.trace_domain import TraceDomain
from properties.trace_laws import TRACE_LAWS


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
