"""Domains of random field values, and what cannot be drawn from them.

    python -m tests.random_domains 600 7     ten minutes of random domains, seed 7: one line for each new fault

Each value alone is legal for its field. A combination must be refused when the domain is made, or else every law that applies to
the domain must draw an example that it accepts and that lies inside the domain.
"""

import collections
import dataclasses
import json
import random
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

from oracles.norm import GATINGS, NORM_FORMS
from oracles.operation import DTYPES
from oracles.operations import RULES
from properties.books import BOOKS, book_of
from properties.calls.domain import CallDomain
from properties.laws.law import Law
from properties.layers.case import EPS as LAYER_EPS
from properties.layers.case import LAYERS
from properties.layers.domain import LayerDomain
from properties.modules.case import ACTIVATIONS, EPS, MODULES, RESIDUALS, STATE_COLUMNS
from properties.modules.domain import ModuleDomain
from properties.paths.case import CHOICES, LAYOUTS
from properties.paths.domain import OPERATIONS, PathDomain, with_forms
from properties.pools.case import BLOCK_SIZES, PADDING_SLOTS
from properties.pools.domain import NOT_OF_POOLS, POOL_STATES, POOL_VIEWS, PoolDomain
from properties.rules.case import (
    CHANNEL_DECAYS,
    DECAYS,
    FINAL_DTYPES,
    FINAL_STATES,
    IN_KERNEL,
    INITIAL_STATES,
    LEFT_OUT,
    PARAMETER_DTYPES,
    STATE_DTYPES,
)
from properties.rules.domain import STRENGTHS, Domain
from properties.rules.numbers import LOWER_BOUNDS, NORM_EPS, SCALES
from properties.traces.case import ALIGNED
from properties.traces.domain import CONV_WIDTHS, EVENTS, SNAPSHOTS, TraceDomain
from properties.words.domain import LARGEST, Drawing
from properties.words.example import Example
from verify.engine.drawing import seeded
from verify.execution.line import Run

Draw = Callable[[random.Random], Any]


def one(*values: Any) -> Draw:
    return lambda chance: chance.choice(values)


def some(*values: Any, least: int = 1) -> Draw:
    return lambda chance: tuple(chance.sample(values, chance.randint(least, len(values))))


def of_choices(chance: random.Random) -> Any:
    return tuple((name, some(*values)(chance)) for name, values in CHOICES.items() if chance.random() < 0.7)


WIDTHS = one((), (), (16,), (128,), (1,), (3, 7), (64, 128), (5,), (256, 512), (32, 1000))
SPANS = one((1, 256), (16, 16), (3, 5), (64, 128), (1, 1), (200, 256), (1, 1024), (9, 10), (1, 7), (1000, 4000))
TAPS = one((4,), (1,), (2, 3), (8,), (4, 2, 3, 1, 5, 8), (64,), (9, 100))
OPTIONS = one((), (), (("host", ("no", "yes")),), (("mode", ("a", "b", "c")), ("host", ("no", "yes"))))
DTYPE, OFFSETS, STEPS = some(*DTYPES), some("int64", "int32"), one(1, 8, 3, 16, 64, 2)
LONG, CHUNK = one(0, 0, 1030, 4096, 65_536, 1, 64), one(64, 1, 16, 1024, 128)
# The values of each field; of a flag, both.
FIELDS: dict[type[Any], dict[str, Draw]] = {
    Domain: {
        "operation": one(*RULES),
        "dtypes": DTYPE,
        "gate_dtypes": some("fp32", "input"),
        "key_dims": SPANS,
        "value_dims": SPANS,
        "width_step": STEPS,
        "key_widths": WIDTHS,
        "value_widths": WIDTHS,
        "in_kernel": some(*IN_KERNEL),
        "decays": some(*DECAYS),
        "scales": some(*SCALES),
        "strongest_decay": one(*STRENGTHS),
        "largest_values": one(*LARGEST),
        "left_out": some(*LEFT_OUT),
        "channel_decays": some(*CHANNEL_DECAYS),
        "lower_bounds": some(*LOWER_BOUNDS),
        "parameter_dtypes": some(*PARAMETER_DTYPES),
        "qk_norm_eps": some(*NORM_EPS),
        "qk_norm_forms": some(*NORM_FORMS),
        "options": OPTIONS,
        "exact_options": one((), ("host",)),
        "length_step": one(1, 2, 16, 64, 100, 1024, 3),
        "longest": one(None, 1, 64, 66, 96, 128, 130, 192, 300, 3072, 4096),
        "offsets": OFFSETS,
        "state_dtypes": some(*STATE_DTYPES),
        "final_dtype": one(*FINAL_DTYPES),
        "initial_states": one(*INITIAL_STATES),
        "final_states": one(*FINAL_STATES),
        "drawing": lambda chance: Drawing(reach=chance.choice((1, 1, 1, 32, 2)), long=LONG(chance), chunk=CHUNK(chance)),
        "batch_heads": one(None, 512, 65_535, 8),
        "views": one(True, False, ("sliced", "offset"), ("offset",), ("strided", "expanded"), ("transposed",), ("far",), ()),
        "negative_eigenvalues": one(True, False, ("given",), ("kernel",)),
    },
    ModuleDomain: {
        "operation": one("causal_conv1d", *MODULES),
        "dtypes": DTYPE,
        "widths": SPANS,
        "width_step": STEPS,
        "fixed_widths": WIDTHS,
        "conv_widths": TAPS,
        "activations": some(*ACTIVATIONS),
        "eps": some(*EPS),
        "longest": one(1, 2, 3, 4, 5, 8, 64, 130, 2**20),
        "state_columns": one(*STATE_COLUMNS),
        "residuals": some(*RESIDUALS),
        "gatings": some(*GATINGS),
        "lower_bounds": some(*LOWER_BOUNDS),
        "parameter_dtypes": some(*PARAMETER_DTYPES),
        "options": OPTIONS,
        "exact_options": one((), ("host",)),
        "largest_values": one(*LARGEST),
        "offsets": OFFSETS,
        "drawing": lambda chance: Drawing(long=LONG(chance)),
    },
    PathDomain: {
        "operation": one(*OPERATIONS, "decode"),
        "ranks": one(1, 2, 3, 4, 8, 0, 64),
        "exchange_ranks": one(1, 2, 4, 64, 0),
        "layouts": some(*LAYOUTS),
        "in_kernel": one(("none",), ("none", "gate"), ("none", "gate", "beta", "both")),
        "dtypes": DTYPE,
        "offsets": OFFSETS,
        "widths": one((8, 16, 4, 12), (8,), (1,), (256,), (128, 64), ()),
        "conv_widths": TAPS,
        "choices": of_choices,
        "slow": one((), ("conv=fla",), ("rule=fla", "conv=fla")),
        "longest": one(66, 1, 2, 8, 20, 64, 500),
        "least_piece": one(0, 1, 2, 4, 8, 64),
        "tf32": one((), ("rule=fla",)),
        "qk_norm_eps": some(*NORM_EPS),
        "qk_norm_forms": some(*NORM_FORMS),
        "compiled_widths": one((), (64,), (64, 128)),
        "drawing": lambda chance: Drawing(chunk=CHUNK(chance)),
    },
    PoolDomain: {
        "operation": one("decode"),
        "rule": lambda chance: random_domain(Domain, chance, chance.randint(0, 4), {*NOT_OF_POOLS}),
        "most_tokens": one(1, 2, 3, 4, 8, 130, 1000),
        "padding_slots": some(*PADDING_SLOTS, least=0),
        "indices": OFFSETS,
        "blocks": some(*BLOCK_SIZES, least=0),
        "layout": one("kv", "vk"),
        "state_dtypes": some(*POOL_STATES),
        "views": some(*POOL_VIEWS),
        "options": OPTIONS,
    },
    LayerDomain: {
        "operation": one(*LAYERS),
        "dtypes": DTYPE,
        "widths": one((8,), (1,), (256,), (64, 128), (8, 16, 4, 12, 32, 128)),
        "conv_widths": TAPS,
        "eps": some(*LAYER_EPS),
        "qk_norm_eps": some(*NORM_EPS),
        "qk_norm_forms": some(*NORM_FORMS),
        "offsets": OFFSETS,
        "gatings": some(*GATINGS),
        "lower_bounds": some(*LOWER_BOUNDS),
        "parameter_dtypes": some(*PARAMETER_DTYPES),
        "options": OPTIONS,
        "drawing": lambda chance: Drawing(long=LONG(chance), chunk=CHUNK(chance)),
    },
    TraceDomain: {
        "operation": one("serving"),
        "events": some(*EVENTS),
        "dtypes": DTYPE,
        "states": DTYPE,
        "key_dims": one((4, 128), (1, 3), (128, 128), (8, 8), (1, 1)),
        "value_dims": one((4, 128), (1, 3), (128, 128), (8, 8), (1, 1), (1, 5), (1, 9)),
        "width_step": one(1, 3, 4, 8, 16, 128),
        "widths": some(*CONV_WIDTHS),
        "most_tokens": one(1, 2, 3, 8, 64, 130),
        "most_drafts": one(1, 2, 3, 8),
        "block": one(0, 1, 3, 16, 64, 256, 1056),
        "padding_slots": some(*PADDING_SLOTS, least=0),
        "most_padding": one(1, 2, 8),
        "snapshots": some(*SNAPSHOTS),
        "alignments": some(*ALIGNED),
        "snapshot_dtype": one("state", "input"),
        "indices": OFFSETS,
        "key_widths": one((), (8,), (128,), (1,), (3,), (512,)),
        "value_widths": one((), (8,), (128,), (1,), (3,), (512,), (3, 8)),
        "qk_norm_eps": some(*NORM_EPS),
        "qk_norm_forms": some(*NORM_FORMS),
    },
    CallDomain: {
        "operation": one("call"),
        "inputs": one(
            {"x": "B T D"},
            {"q": "B T H K", "v": "B T HV V"},
            {"x": "B T D", "cu_seqlens": "offsets"},
            {"x": "B T D", "s": "N H K", "cu_seqlens": "offsets"},
            {"x": "B T D", "w": "D K"},
            {"w": "D"},
            {"x": "B T"},
        ),
        "outputs": one({"y": "B T D"}, {"y": "B T H K"}, {"y": "B T D", "s": "N H K"}, {"y": "D"}, {"y": "B T"}),
        "sizes": one((), {"D": (3, 5)}, {"H": (2,)}, {"HV": (3,)}, {"HV": (3,), "H": (2,)}, {"HV": (3, 8), "H": (4, 1)}),
        "dtypes": DTYPE,
        "longest": one(1, 2, 3, 80, 150, 2000),
    },
}


DRAWN = one(Drawing())


def random_domain(kind: type[Any], chance: random.Random, changes: int, left_out: set[str] = frozenset()) -> Any:  # type: ignore[assignment]
    """A domain of which so many fields have random values; domains that are refused when they are made are drawn again."""
    names = [field.name for field in dataclasses.fields(kind) if field.name not in left_out]
    while True:
        chosen = chance.sample(names, changes)
        try:
            return kind(
                **{name: FIELDS[kind].get(name, DRAWN if name == "drawing" else one(True, False))(chance) for name in chosen}
            )
        except ValueError as error:
            if "\n" in str(error):
                raise AssertionError("a refusal is one line") from error


def laws_of(domain: Any) -> Iterator[Law]:
    """The laws that apply to a domain, on a CPU and, where they draw otherwise, on a GPU."""
    for law in book_of(domain).laws.values():
        if (not law.about or domain.operation in law.about) and law.needs(domain) is None:
            yield law
            if law.draw_gpu is not None:
                yield law.on_gpu()


def faults(domain: Any, seed: int, count: int = 1) -> dict[str, str]:
    """For each law that cannot draw `count` examples inside the domain which it accepts, also from their lines, what goes wrong."""
    found: dict[str, str] = {}
    if type(domain).from_json(json.loads(json.dumps(domain.to_json()))) != domain:
        found["to_json"] = "another domain comes back from its data"
    for law in laws_of(domain):
        examples = list[Example]()
        try:
            seeded(law.draw(domain), seed, count, examples.append)
            assert len(examples) == count
            for example in examples:
                law.accept(example)
                run = Run(law.name, "fla/chunk", example)
                assert Run.parse(str(run)) == run
        except Exception as error:
            found[law.name] = f"{type(error).__name__}: {error}"
        reasons = [law.within(domain).outside(example.case) or law.outside(domain, example) for example in examples]
        if outside := next(filter(None, reasons), None):
            found.setdefault(law.name, f"outside the domain: {outside}")
    return found


def as_checked(domain: Any, chance: random.Random) -> Any:
    """The domain, or that of a check on a GPU, which draws paths with few forms."""
    return with_forms(domain, chance.randrange(100)) if isinstance(domain, PathDomain) and chance.random() < 1 / 3 else domain


def changed(domain: Any) -> dict[str, Any]:
    """The fields of a domain that differ from their defaults."""
    fields = {field.name: getattr(domain, field.name) for field in dataclasses.fields(domain)}
    return {name: value for name, value in fields.items() if value != getattr(type(domain), name, None)}


def main(seconds: float, seed: int) -> None:
    """Try random domains for so long, and print each new fault."""
    chance, seen, tried = random.Random(seed), set[tuple[str, str, str]](), collections.Counter[str]()
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        kind = chance.choice([book.domain for book in BOOKS])
        domain = as_checked(random_domain(kind, chance, chance.choice((1, 2, 3, 5, 8))), chance)
        tried[kind.__name__] += 1
        for law, fault in faults(domain, chance.randrange(2**16), 2).items():
            key = (kind.__name__, law, "".join(letter for letter in fault if not letter.isdigit())[:60])
            if key not in seen:
                seen.add(key)
                print(kind.__name__, law, fault[:200], changed(domain), flush=True)
    print(f"{sum(tried.values())} domains: {dict(tried)}; {len(seen)} faults")


if __name__ == "__main__":
    main(float(sys.argv[1]), int(sys.argv[2]))
