"""A run: law, adapter, case and configuration, which can be written as one line."""

import dataclasses

from oracles import PRODUCTS
from properties.books import book_for, book_of
from properties.laws.law import Law
from properties.words.example import Example
from properties.words.line import split_line
from properties.words.outside import OUTSIDE
from verify.adapters.registry import check_spec
from verify.gpu import policies
from verify.process.choices import DEVICES


@dataclasses.dataclass(frozen=True)
class Run:
    """What `gdn-verify repeat` repeats: a law, an adapter, an example and a configuration. `str` gives the line."""

    law: str
    adapter: str
    example: Example
    products: str = "ieee"
    device: str = "cpu"
    tune: str = ""  # a Policy of verify/gpu/policies.py; "" leaves kernels as they are
    outside: str = ""  # what the case has although the domain leaves it out (properties/words/outside.py)

    def __str__(self) -> str:
        example = self.example
        words = [f"law={self.law}"]
        words += [f"at={example.at}"] if example.at is not None else []
        words += [f"variant={example.variant}"] if example.variant else []
        words += [f"adapter={self.adapter}"]
        words += [f"products={self.products}"] if self.products != "ieee" else []
        words += [f"device={self.device}"] if self.device != "cpu" else []
        words += [f"tune={self.tune}"] if self.tune else []
        words += [f"outside={self.outside}"] if self.outside else []
        return " ".join([*words, str(example.case)])

    @property
    def everywhere(self) -> str:
        """The line without what may depend on the machine: the place of the adapter's file, and how its kernels run."""
        return str(Run(self.law, "-", self.example))

    @classmethod
    def parse(cls, line: str, *, here: bool = True) -> "Run":
        """Parse a line. ValueError or AdapterError names the wrong word, its value and the choices.

        Without `here`, the file of an adapter may be on another machine.
        """
        words = split_line(line)
        for name in ("law", "adapter"):
            if name not in words:
                raise ValueError(f"a run line must have {name}=..., got {line!r}")
        name = words.pop("law")
        book = book_for(name, words.get("op"))
        adapter = words.pop("adapter")
        if here:
            check_spec(adapter)
        products = words.pop("products", "ieee")
        if products not in PRODUCTS:
            raise ValueError(f"products must be one of {', '.join(PRODUCTS)}, got {products!r}")
        device = words.pop("device", "cpu")
        if device not in DEVICES:
            raise ValueError(f"device must be one of {', '.join(DEVICES)}, got {device!r}")
        tune = words.pop("tune", "")
        if tune:
            policies.Policy.parse(tune)
        outside = words.pop("outside", "")
        if outside and outside not in OUTSIDE:
            raise ValueError(f"outside must be one of {', '.join(OUTSIDE)}, got {outside!r}")
        at = words.pop("at", None)
        if at is not None and not at.isdecimal():
            raise ValueError(f"at must be a whole number, got {at!r}")
        variant = words.pop("variant", None)
        case = book.case.parse(" ".join(f"{word}={value}" for word, value in words.items()))
        example = Example(case, None if at is None else int(at), variant)
        book.laws[name].accept(example)
        return cls(name, adapter, example, products, device, tune, outside)

    @property
    def the_law(self) -> Law:
        """The law, from the book of the run's case."""
        return book_of(self.example.case).laws[self.law]
