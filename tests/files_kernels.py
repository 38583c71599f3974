"""The rule of examples/answer_files.py as adapters, right and wrong, so that a check and answers in files can be compared."""

import importlib.util
import pathlib
import types

from torch import Tensor

from oracles.operation import Inputs
from properties.rules.domain import Domain
from verify.adapters.base import Adapter
from verify.adapters.files_adapter import FilesAdapter
from verify.adapters.process_adapter import options_of

EXAMPLE = pathlib.Path(__file__).resolve().parent.parent / "examples" / "answer_files.py"
DOMAIN = Domain(dtypes=("fp32", "bf16"), key_dims=(1, 64), value_dims=(1, 64))


def example() -> types.ModuleType:
    """The example as a module of its own each time."""
    spec = importlib.util.spec_from_file_location("answer_files", EXAMPLE)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def wrong(module: types.ModuleType) -> types.ModuleType:
    """The example, whose state does not decay beyond the first 64 tokens of a call."""
    right = module.rule

    def rule(x: dict[str, Tensor], options: dict[str, str]) -> dict[str, Tensor]:
        g = x["g"].clone()
        g[:, 64:] = 0
        return dict(right({**x, "g": g}, options))

    module.rule = rule  # type: ignore[attr-defined]
    return module


class Right(Adapter):
    """The example's rule, called by gdn-verify itself."""

    algorithm = "recurrent"
    domain = DOMAIN
    module = staticmethod(example)

    def run(self, x: Inputs) -> tuple[Tensor, Tensor | None]:
        from verify.adapters.foreign import Call

        call = Call(Elsewhere(), x)
        found = self.module().rule(call.tensors, dict(text.split("=", 1) for text in options_of(call)))
        final = found["final_state"].float() if x.output_final_state else None
        return found["o"].to(x.v.dtype), final


class Wrong(Right):
    """The wrong rule, called by gdn-verify itself."""

    module = staticmethod(lambda: wrong(example()))


class Elsewhere(FilesAdapter):
    """The declarations of both, for an implementation that runs elsewhere."""

    algorithm = "recurrent"
    domain = DOMAIN
