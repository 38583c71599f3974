"""Examples: a case with what a law draws beside it."""

import dataclasses
from typing import Any


@dataclasses.dataclass(frozen=True)
class Example:
    """A case of any kind, with the place (`at`) and the variant of a law that has them."""

    case: Any
    at: int | None = None
    variant: str | None = None
