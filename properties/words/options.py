"""Options: what an implementation lets its callers choose, beside the words that its operation has.

An option has a name and values. Callers get the first value if they do not pass the option. An adapter names its options in its
domain and reads the values of a call in `x.options`. No option changes the truth, so every law that compares with the oracle judges
calls with options too. The law `absent` of rules and modules compares a call with the same call without an
option.
"""

import random
from collections.abc import Mapping

Options = tuple[tuple[str, tuple[str, ...]], ...]
NONE = "none"
SELDOM = 3  # one case in so many has another value of an option than its first


def values_of(text: str) -> dict[str, str]:
    """Return the values by option of a word such as cu_seqlens_cpu:yes,mode:train. ValueError for another form."""
    values: dict[str, str] = {}
    for item in text.split(",") if text != NONE else ():
        name, colon, value = item.partition(":")
        if not (name.isidentifier() and colon and value) or name in values:
            raise ValueError(f"options must be {NONE}, or name:value joined by commas, each name once, got {text[:80]!r}")
        values[name] = value
    return values


def text_of_values(values: Mapping[str, str]) -> str:
    """Return the word of these values."""
    return ",".join(f"{name}:{value}" for name, value in values.items()) or NONE


def check_options(options: object, exact: object = ()) -> None:
    """Raise ValueError for the fields `options` and `exact_options` of a domain that are not of their form."""
    pairs = options if isinstance(options, tuple) else (None,)
    for pair in pairs:
        if not (isinstance(pair, tuple) and len(pair) == 2 and isinstance(pair[0], str) and pair[0].isidentifier()):
            raise ValueError(f"options must be pairs of a name and a tuple of values, got {options!r}")
        name, values = pair
        if not (isinstance(values, tuple) and len({*values}) == len(values) > 1 and all(map(_is_value, values))):
            raise ValueError(f"options must have two values or more for {name}, texts without commas and spaces, got {values!r}")
    names = [name for name, _ in pairs]
    if len({*names}) < len(names):
        raise ValueError(f"options must name each option once, got {', '.join(names)}")
    if not isinstance(exact, tuple) or not {*exact} <= {*names}:
        raise ValueError(f"exact_options must be a tuple of some of {', '.join(names) or 'no options'}, got {exact!r}")


def _is_value(value: object) -> bool:
    return isinstance(value, str) and bool(value) and not set(value) & set(", :=")


def outside_options(options: Options, text: str) -> str | None:
    """Return why the word `options` of a case is outside a domain with these options, or None."""
    known = dict(options)
    for name, value in values_of(text).items():
        if value not in known.get(name, ()):
            return f"options={name}:{value} is not among {', '.join(f'{n}:{v}' for n, vs in options for v in vs) or 'none'}"
    return None


def draw_options(chance: random.Random, options: Options) -> str:
    """Draw a value for each option, and return the word for the values that are not the first. Draws nothing without options."""
    drawn = {name: chance.choice(values[1:]) for name, values in options if chance.randrange(SELDOM) == 0}
    return text_of_values(drawn)


def all_values(options: Options, text: str) -> dict[str, str]:
    """Return the value of every option in a call whose case has the word `text`."""
    return {name: values[0] for name, values in options} | values_of(text)
