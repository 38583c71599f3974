"""An adapter whose implementation computes on arrays of another library: JAX, MLX, NumPy or CuPy."""

import abc
import importlib.util
import itertools
from collections.abc import Sequence
from typing import Any, ClassVar

import numpy
import torch
from torch import Tensor

from oracles.operation import Inputs, gradient_name
from verify.adapters.foreign import WORDS, Call, ForeignAdapter, Outputs, Place, Pullback

# The libraries, each with the package that must be there and what pip installs.
LIBRARIES = {
    "jax": ("jax", "jax"),
    "mlx": ("mlx", "mlx[cpu]"),
    "numpy": ("ml_dtypes", "ml_dtypes"),
    "cupy": ("cupy", "cupy-cuda12x"),
}
DIFFERENTIATES = ("jax", "mlx")
NARROWER = {torch.int64: torch.int32, torch.float64: torch.float32}


class ArrayAdapter(ForeignAdapter):
    """A function on arrays of another library.

    - `library` is "jax", "mlx", "numpy" or "cupy".
    - `layout` and `absent` as for a ForeignAdapter. Without a layout, arrays have the shapes that the operation has in torch.

    bfloat16 is `jax.numpy.bfloat16`, `mlx.core.bfloat16` or, for NumPy, `ml_dtypes.bfloat16`. NumPy's arrays are the memory of the
    call, with its strides; JAX and MLX get copies. JAX gets int64 as int32, unless jax_enable_x64 is set.
    """

    library: ClassVar[str] = ""

    @abc.abstractmethod
    def compute(self, x: Inputs) -> Any:
        """Return the outputs in the operation's order, as a tuple if there are several.

        x has what `Adapter.run` gets, with arrays in place of tensors.
        """

    def vjp(self, x: Inputs, names: Sequence[str]) -> tuple[Any, Any]:
        """Return the outputs, and a function that computes gradients of the inputs called `names`, as `jax.vjp` does.

        The function gets a tuple with one cotangent for each output, None for an output that is None. It returns a tuple of arrays
        with the shapes and dtypes of the inputs. By default JAX and MLX differentiate `compute`. For NumPy and CuPy write a method.
        """
        leaves = [x[name] for name in names]

        def function(*leaves: Any) -> tuple[Any, ...]:
            return _several(self.compute(x.replaced(**dict(zip(names, leaves, strict=True)))))

        if self.library == "jax":
            import jax

            found: tuple[Any, Any] = jax.vjp(function, *leaves)
            return found
        import mlx.core

        def arrays(*leaves: Any) -> list[Any]:
            return [output for output in function(*leaves) if output is not None]

        def pullback(cotangents: Sequence[Any]) -> Any:
            return mlx.core.vjp(arrays, leaves, [x for x in cotangents if x is not None])[1]

        return function(*leaves), pullback

    def bring(self) -> None:
        """Import the library."""
        importlib.import_module("mlx.core" if self.library == "mlx" else self.library)

    def _wrong(self) -> str | None:
        if self.library not in LIBRARIES:
            return f"library must be one of {', '.join(LIBRARIES)}, got {self.library!r}"
        package, name = LIBRARIES[self.library]
        if importlib.util.find_spec(package) is None:
            return f"{self.library} needs {package}, which is not installed: pip install '{name}'"
        own = type(self).vjp is not ArrayAdapter.vjp
        if self.domain.backward and not own and self.library not in DIFFERENTIATES:
            return f"{self.library} has no gradients: its domain must have backward=False, or the adapter a method vjp"
        return None

    def _outputs(self, call: Call) -> Outputs:
        return self._tensors(call, _several(self.compute(self._arrays(call))))

    def _with_pullback(self, call: Call, leaves: Sequence[str]) -> tuple[Outputs, Pullback]:
        returned, pull = self.vjp(self._arrays(call), leaves)
        arrays = _several(returned)

        def pullback(_: Sequence[Tensor], cotangents: Sequence[Tensor | None]) -> list[Tensor]:
            given = []
            for port, array, x in zip(call.operation.outputs, arrays, cotangents, strict=False):
                place = call.outputs.get(port.name)
                given.append(None if array is None or x is None else self._array(place or call.place("", x.shape, x.dtype), x))
            return self._gradients(call, leaves, _several(pull(tuple(given))))

        return self._tensors(call, arrays), pullback

    def _gradients(self, call: Call, leaves: Sequence[str], found: Sequence[Any]) -> list[Tensor]:
        gradients = []
        for name, array in zip(leaves, found, strict=True):
            x = call.tensors[name]
            gradient = call.place(name, x.shape, x.dtype).ours(tensor_of(array), call.device)
            if (gradient.shape, gradient.dtype) != (x.shape, x.dtype):
                got = f"{gradient.dtype} of shape {(*gradient.shape,)}"
                raise ValueError(f"{gradient_name(name)} must be {x.dtype} of shape {(*x.shape,)}, got {got}")
            gradients.append(gradient)
        return gradients

    def _arrays(self, call: Call) -> Inputs:
        return Inputs(**{**call.x, **{place.name: self._array(place, x) for place, x in call.sent().items()}})

    def _tensors(self, call: Call, arrays: Sequence[Any]) -> Outputs:
        """The outputs as tensors, with None for those that are not returned."""
        found: list[Tensor | None] = []
        for port, array in itertools.zip_longest(call.operation.outputs, arrays):
            x = None if array is None else tensor_of(array)
            place = call.outputs.get(port.name) if port else None
            found.append(x if x is None or place is None else place.ours(x, call.device))
        return tuple(found)

    def _array(self, place: Place, x: Tensor) -> Any:
        """The tensor as an array of the library."""
        if self.library == "numpy":
            return numpy_of(place.theirs(x, strided=True))
        if self.library == "mlx":
            import mlx.core

            return mlx.core.array(_narrowed("MLX", place, x, torch.float64))
        if self.library == "jax":
            import jax

            narrow = () if jax.config.jax_enable_x64 else (torch.int64, torch.float64)
            return jax.numpy.array(numpy_of(_narrowed("JAX", place, x, *narrow)))
        import cupy

        return cupy.asarray(numpy_of(place.theirs(x)))


def _several(outputs: Any) -> tuple[Any, ...]:
    return tuple(outputs) if isinstance(outputs, tuple | list) else (outputs,)


def _narrowed(library: str, place: Place, x: Tensor, *lacking: torch.dtype) -> Tensor:
    """The tensor on the other side, narrower if the library lacks its dtype. ValueError if that changes a number."""
    x = place.theirs(x)
    if x.dtype not in lacking:
        return x
    narrow = x.to(NARROWER[x.dtype])
    if not torch.equal(narrow.to(x.dtype), x):
        raise ValueError(f"{library} has no {WORDS[x.dtype]}, and {WORDS[narrow.dtype]} cannot have all numbers of {place.name}")
    return narrow


def numpy_of(x: Tensor) -> Any:
    """The tensor's memory as an array of NumPy."""
    if x.dtype != torch.bfloat16:
        return x.numpy()
    import ml_dtypes

    return x.view(torch.int16).numpy().view(ml_dtypes.bfloat16)


def tensor_of(array: Any) -> Tensor:
    """A copy of an array as a tensor on the CPU. NumPy can't read MLX's bfloat16, and torch can't take NumPy's negative strides."""
    if type(array).__module__.startswith("mlx"):
        return torch.utils.dlpack.from_dlpack(array).clone()
    if type(array).__module__.startswith("cupy"):
        array = array.get()
    copy = numpy.array(array, order="C")
    if copy.dtype.name == "bfloat16":
        return torch.from_numpy(copy.view(numpy.int16)).view(torch.bfloat16)
    return torch.from_numpy(copy)
