"""The wrong implementations ("animals"): every class with a `letter` in the modules `wrong_*.py` of this package."""

import dataclasses
import difflib
import functools
import importlib
import pathlib
from collections.abc import Iterable, Mapping

from verify.adapters.loader import AnyAdapter, Kind, load
from verify.adapters.registry import ZOO
from verify.zoo.incidents import INCIDENTS, LETTERS


@dataclasses.dataclass(frozen=True)
class Animal:
    """A wrong implementation.

    It has a name, its name as an adapter (`spec`), its class, the letter of its class of defects, the rows of the incidents that it
    repeats, and a `story`: one line about what it does wrong.
    """

    name: str
    spec: str
    kind: Kind
    letter: str
    incident: tuple[int, ...]
    story: str


@functools.cache
def animals() -> Mapping[str, Animal]:
    """Every animal of this package, by name. ValueError if two share a name, or if a letter, incident or story is not valid."""
    found: dict[str, Animal] = {}
    for path in sorted(pathlib.Path(__file__).parent.glob("wrong_*.py")):
        for animal in of_module(importlib.import_module(f"{__package__}.{path.stem}")):
            if animal.name in found:
                modules = f"{found[animal.name].kind.__module__} and {animal.kind.__module__}"
                raise ValueError(f"two animals are called {animal.name}, in {modules}")
            found[animal.name] = animal
    return found


@functools.cache
def by_spec() -> Mapping[str, Kind]:
    """Every adapter of the zoo, right and wrong, by its adapter name."""
    return {**rights(), **{animal.spec: animal.kind for animal in animals().values()}}


@functools.cache
def rights() -> Mapping[str, Kind]:
    """The right implementations from which animals are derived, by adapter name. A case that rejects them too is no kill."""
    found = (right_of(animal.kind) for animal in animals().values())
    return {ZOO + kind.__name__: kind for kind in found if kind is not None}


def right_of(kind: Kind) -> Kind | None:
    """The nearest base class of an animal in this package that is concrete and no animal itself; None if there is none."""
    for base in kind.__mro__[1:]:
        inside = base.__module__.startswith(f"{__package__}.")
        if inside and issubclass(base, AnyAdapter) and not hasattr(base, "letter") and not base.__abstractmethods__:
            return base
    return None


def of_module(module: object) -> list[Animal]:
    """The animals that a module defines, in their order in the module."""
    name = getattr(module, "__name__", "")
    kinds = [kind for kind in vars(module).values() if isinstance(kind, type) and kind.__module__ == name]
    return [labelled(kind) for kind in kinds if issubclass(kind, AnyAdapter) and hasattr(kind, "letter")]


def labelled(kind: Kind, spec: str | None = None) -> Animal:
    """The Animal of a class. ValueError if the letter, the incidents or the story is not valid."""
    letter, incident = getattr(kind, "letter", None), getattr(kind, "incident", ())
    if letter not in LETTERS:
        raise ValueError(f"letter of {kind.__name__} must be one of {' '.join(LETTERS)}, got {letter!r}")
    if not (isinstance(incident, tuple) and set(incident) <= set(INCIDENTS)):
        raise ValueError(f"incident of {kind.__name__} must be a tuple of rows in 1..{len(INCIDENTS)}, got {incident!r}")
    story = " ".join((vars(kind).get("__doc__") or "").split())
    if not story:
        raise ValueError(f"{kind.__name__} must have a docstring that says what is wrong")
    return Animal(kind.__name__, spec or ZOO + kind.__name__, kind, letter, incident, story)


def chosen(names: Iterable[str] = (), letters: Iterable[str] = ()) -> list[Animal]:
    """The animals with one of these names and one of these letters; without names, or letters, all. ValueError lists the choices.

    A name is one of the zoo's, with or without `zoo/`, or FILE.py:CLASS, a class with a letter in a file of your own.
    """
    every, found = animals(), dict[str, Animal]()
    for name in names:
        if ".py:" in name:
            found[name] = labelled(type(load(name)), name)
        elif name.removeprefix(ZOO) in every:
            animal = every[name.removeprefix(ZOO)]
            found[animal.spec] = animal
        else:
            near = ", ".join(difflib.get_close_matches(name, every, 3, 0.3)) or "none"
            raise ValueError(f"unknown animal {name!r}; of {len(every)} the nearest are {near}, or your own as FILE.py:CLASS")
    wanted = set(letters)
    picked = list(found.values()) or list(every.values())
    return [animal for animal in picked if not wanted or animal.letter in wanted]
