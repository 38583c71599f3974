"""Safetensors files. What we read was written by others, so a file decides nothing: neither how much is read nor where from.

A file is the length of its header in 8 bytes, the header in JSON, and the bytes of the tensors. The package `safetensors` is not
used, because it takes names, dtypes and shapes from the file. We know them before we open it.
"""

import contextlib
import ctypes
import errno
import json
import math
import os
import stat
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NoReturn, TypeGuard

import torch
from torch import Tensor

NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.bool: "BOOL",
}
ENDING = ".safetensors"
FORMAT = "gdn-verify files 1"
MANIFEST = "manifest.json"
PIECE = 2**24  # bytes that are written between two looks at whether to go on
LENGTH = 8  # bytes of the number that a file begins with
MOST_HEADER = 2**20
MOST_BYTES, MOST_AXES = 2**33, 8  # of a file whose tensors nobody has told us
Must = Mapping[str, tuple[torch.dtype, Sequence[int]]]


class WrongFile(Exception):
    """A file is not what it has to be. The message is one line."""


def one_line(what: object) -> str:
    """The text of an error, or of a name, in one line of printable characters."""
    return "".join(sign if sign.isprintable() else "?" for sign in " ".join(str(what).split())[:200])


def memory_of(x: Tensor) -> memoryview:
    """The bytes of a contiguous tensor on the CPU."""
    if not x.numel():
        return memoryview(bytearray())
    return memoryview((ctypes.c_char * (x.numel() * x.element_size())).from_address(x.data_ptr())).cast("B")


def write(path: str, tensors: Mapping[str, Tensor], about: Mapping[str, str], between: Callable[[], None] = lambda: None) -> int:
    """Write contiguous tensors on the CPU, with text `about` them. The file appears when it is complete. Returns its bytes.

    `between` is called between pieces, and may raise to end the writing: then there is no file.
    """
    header: dict[str, Any] = {"__metadata__": dict(about)} if about else {}
    end = 0
    for name, x in tensors.items():
        begin, end = end, end + x.numel() * x.element_size()
        header[name] = {"dtype": NAMES[x.dtype], "shape": [*x.shape], "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % LENGTH)
    parts: list[bytes | memoryview] = [len(text).to_bytes(LENGTH, "little"), text, *map(memory_of, tensors.values())]
    write_bytes(path, _pieces(parts, between))
    return LENGTH + len(text) + end


def _pieces(parts: Iterable[bytes | memoryview], between: Callable[[], None]) -> Iterator[bytes | memoryview]:
    for part in parts:
        for begin in range(0, len(part), PIECE):
            between()
            yield part[begin : begin + PIECE]


def write_bytes(path: str, parts: Iterable[bytes | memoryview]) -> None:
    """Write a file, which appears when it is complete: if that fails, nothing is left. No link is followed."""
    part = f"{path}.part"
    if os.path.lexists(part):  # of an earlier process
        os.unlink(part)
    try:
        with open(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666), "wb") as file:
            file.writelines(parts)
        os.replace(part, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(part)
        raise


def opened(path: str) -> tuple[Any, int]:
    """A file that is open for reading, and its bytes. FileNotFoundError if there is none, WrongFile if it is no ordinary file."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        raise
    except OSError as error:
        raise WrongFile("is a link" if error.errno == errno.ELOOP else f"cannot be read: {error.strerror}") from None
    status = os.fstat(descriptor)
    if not stat.S_ISREG(status.st_mode):
        os.close(descriptor)
        raise WrongFile("is no ordinary file")
    return open(descriptor, "rb"), status.st_size


def parsed(text: bytes, *, fractions: bool = False) -> Any:
    """JSON whose objects have no name twice, perhaps with fractions. WrongFile if the text is something else."""

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) < len(pairs):
            raise ValueError("an object has a name twice")
        return found

    def refuse(number: str) -> NoReturn:
        raise ValueError(f"{number[:20]} is no whole number")

    try:
        return json.loads(text, object_pairs_hook=unique, parse_float=float if fractions else refuse, parse_constant=refuse)
    except RecursionError:
        raise WrongFile("its JSON is too deep") from None
    except ValueError as error:
        raise WrongFile(f"its JSON cannot be read: {one_line(error)}") from None


def read(path: str, must: Must | None = None) -> dict[str, Tensor]:
    """The tensors of a file, which has exactly those that `must` names. FileNotFoundError; WrongFile says what is wrong.

    The header is checked before memory for a tensor is taken, and that memory is what `must` says. With None, the file has any
    tensors, which take no more memory than the file has bytes, of at most MOST_BYTES.
    """
    file, size = opened(path)
    with file:
        length = int.from_bytes(file.read(LENGTH), "little")
        if size < LENGTH or length > min(MOST_HEADER, size - LENGTH):
            raise WrongFile(f"has {size} bytes and says that its header has {length}, of at most {MOST_HEADER}")
        header = parsed(file.read(length))
        must = _stated(header, size) if must is None else must
        spans = _spans(header, must)
        end = max((end for _, end in spans.values()), default=0)
        if size != LENGTH + length + end:
            raise WrongFile(f"has {max(0, size - LENGTH - length)} bytes after its header, must have {end}")
        found = {name: torch.empty([*shape], dtype=dtype, device="cpu") for name, (dtype, shape) in must.items()}
        for name in sorted(spans, key=spans.__getitem__):
            memory = memory_of(found[name])
            if file.readinto(memory) != len(memory):
                raise WrongFile("became shorter while it was read")
    return found


def _stated(header: Any, total: int) -> Must:
    """The names, dtypes and shapes in a header. WrongFile if one is none."""
    if total > MOST_BYTES or not isinstance(header, dict):
        raise WrongFile(f"has {total} bytes, of at most {MOST_BYTES}" if total > MOST_BYTES else "its header is no object")
    kinds, must = {word: dtype for dtype, word in NAMES.items()}, dict[str, tuple[torch.dtype, Sequence[int]]]()
    for name in header.keys() - {"__metadata__"}:
        entry = header[name] if isinstance(header[name], dict) else {}
        word = str(entry.get("dtype"))
        shape: Any = entry.get("shape")
        shaped = _whole(shape) and len(shape) <= MOST_AXES and min(shape, default=0) >= 0
        if word not in kinds or not shaped or math.prod(max(1, size) for size in shape) > MOST_BYTES:
            raise WrongFile(f"{name[:40]!r} has dtype {word[:20]!r} and shape {repr(shape)[:60]}, which cannot be read")
        must[name] = kinds[word], shape
    return must


def _spans(header: Any, must: Must) -> dict[str, tuple[int, int]]:
    """Where the bytes of each tensor begin and end. WrongFile unless the header names what it must, one after the other."""
    if not isinstance(header, dict):
        raise WrongFile("its header is no object")
    names = header.keys() - {"__metadata__"}
    if names != must.keys():
        odd = min(must.keys() - names, default="") or min(names - must.keys())
        raise WrongFile(f"{'has no tensor' if odd in must else 'has a tensor that was not asked for:'} {odd[:40]!r}")
    spans = dict[str, tuple[int, int]]()
    for name, (dtype, shape) in must.items():
        entry = header[name] if isinstance(header[name], dict) else {}
        got, want = (entry.get("dtype"), entry.get("shape")), (NAMES[dtype], [*shape])
        if got != want or not _whole(got[1]):
            raise WrongFile(
                f"{name} has dtype {repr(got[0])[:20]} and shape {repr(got[1])[:60]}, must have {want[0]!r} and {want[1]}"
            )
        offsets, most = entry.get("data_offsets"), math.prod(shape) * dtype.itemsize
        if not (_whole(offsets) and len(offsets) == 2 and offsets[1] - offsets[0] == most):
            raise WrongFile(f"{name} has data_offsets {repr(offsets)[:60]}, must have two numbers whose difference is {most}")
        spans[name] = (offsets[0], offsets[1])
    place = 0
    for name, (begin, end) in sorted(spans.items(), key=lambda item: item[1]):
        if begin != place:
            raise WrongFile(f"the bytes of {name} begin at {begin}, must begin at {place}: tensors lie one after the other")
        place = end
    return spans


def _whole(value: Any) -> TypeGuard[list[int]]:
    return isinstance(value, list) and all(type(number) is int for number in value)
