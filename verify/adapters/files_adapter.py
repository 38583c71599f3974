"""An adapter whose implementation runs elsewhere: its questions are files, and so are the answers.

docs/how-to/files.md has the files. A question is what a ProcessAdapter would ask. Its name is a hash of all that is in it, so that
judging a case leads to the files that were written for it, and a question that two laws ask is one file.
"""

import hashlib
import json
import os
import re
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from torch import Tensor

from properties.books import book_named
from verify.adapters.foreign import AskedAdapter, Call, Place
from verify.adapters.interface import Unavailable
from verify.adapters.process_adapter import options_of, words_of
from verify.adapters.registry import ANSWERS, AdapterError
from verify.adapters.tensor_files import (
    ENDING,
    FORMAT,
    MANIFEST,
    NAMES,
    WrongFile,
    memory_of,
    one_line,
    opened,
    parsed,
    read,
    write,
)
from verify.process.child import WrongAnswer

MOST_MANIFEST = 2**26  # bytes
QUESTION = re.compile(r"(call|vjp)-[0-9a-f]{16}")
# What an adapter declares beside its domain, if its kind has it.
DECLARED = ("algorithm", "chunk", "products", "stores", "folds", "rounds_products", "layout", "absent")


class FilesAdapter(AskedAdapter):
    """An implementation that runs where gdn-verify does not, such as in a browser. It declares what `gdn-verify export` writes.

    - `layout` and `absent` as for a ForeignAdapter.
    """

    _answers: ClassVar[str] = ""  # the folder of the answers
    _questions: ClassVar[Mapping[str, Any]] = {}  # those that were exported

    def _ask(self, call: Call, word: str, sent: Mapping[Place, Tensor], asked: Sequence[Place]) -> list[Tensor]:
        tensors = {place.name: place.theirs(x) for place, x in sent.items()}
        options = dict(text.split("=", 1) for text in options_of(call))
        about = {"word": word, "options": options, "inputs": [*map(_described, sent)], "outputs": [*map(_described, asked)]}
        line = f"{word} {' '.join(map(words_of, sent))} ; {' '.join(map(words_of, asked))} ; {options}"
        digest = hashlib.blake2b(line.encode(), digest_size=8)
        for x in tensors.values():
            digest.update(memory_of(x))
        return self._answered(f"{word}-{digest.hexdigest()}", about, tensors, asked)

    def _answered(self, name: str, about: Mapping[str, Any], tensors: Mapping[str, Tensor], asked: Sequence[Place]) -> list[Tensor]:  # noqa: ARG002
        """The answer to a question. Unavailable if there is none, WrongAnswer if its file is wrong."""
        if not self._answers:
            raise Unavailable("its answers are files: gdn-verify export writes the questions, gdn-verify judge reads the answers")
        if name not in self._questions:
            raise Unavailable(f"was not exported: {name}")
        try:
            found = read(os.path.join(self._answers, name + ENDING), {place.name: (place.dtype, place.sizes) for place in asked})
        except FileNotFoundError:
            raise Unavailable(f"no answer: {name}{ENDING}") from None
        except WrongFile as error:
            raise WrongAnswer(f"{name}{ENDING} {error}") from None
        return [found[place.name] for place in asked]

    def _wrong(self) -> str | None:
        return None


class Writer(FilesAdapter):
    """Writes the questions that it is asked to a folder. Its answers are zeros.

    `asked` has the questions since it was last cleared, `written` all of them by name, and `bytes` is the size of their files.
    """

    def __init__(self) -> None:
        self.asked: dict[str, None] = {}
        self.written: dict[str, Mapping[str, Any]] = {}
        self.bytes = 0

    def _answered(self, name: str, about: Mapping[str, Any], tensors: Mapping[str, Tensor], asked: Sequence[Place]) -> list[Tensor]:
        self.asked[name] = None
        if name not in self.written:
            path = os.path.join(self._answers, name + ENDING)
            self.bytes += _bytes_of(path, tensors) or write(path, tensors, {"question": json.dumps(about)})
            self.written[name] = about
        return [place.empty().zero_() for place in asked]


def _bytes_of(path: str, tensors: Mapping[str, Tensor]) -> int:
    """The bytes of the file that an earlier export has written with these tensors; 0 if there is none."""
    try:
        found = read(path, {name: (x.dtype, x.shape) for name, x in tensors.items()})
        same = all(memory_of(found[name]) == memory_of(x) for name, x in tensors.items())
        return os.stat(path, follow_symlinks=False).st_size if same else 0
    except (OSError, WrongFile):
        return 0


def _described(place: Place) -> dict[str, Any]:
    return {"name": place.name, "dtype": NAMES[place.dtype], "shape": [*place.sizes]}


def declared_by(adapter: object) -> dict[str, Any]:
    """What an adapter declares beside its domain, as plain data."""
    found = {name: getattr(adapter, name) for name in DECLARED if hasattr(adapter, name)}
    return {name: dict(value) if isinstance(value, Mapping) else value for name, value in found.items()}


def kind_of(manifest: Mapping[str, Any], base: type[FilesAdapter], answers: str) -> type[FilesAdapter]:
    """The class of an adapter that declares what a manifest says, and whose answers are in a folder."""
    declared = {name: manifest["declares"][name] for name in DECLARED if name in manifest["declares"]}
    domain = book_named(manifest["book"]).domain.from_json(manifest["domain"])
    questions = manifest.get("questions", {})
    words = {"domain": domain, "cost": "quick", "_answers": answers, "_questions": questions}
    return type("Exported", (base,), {**declared, **words})


def judged_by(spec: str) -> type[FilesAdapter]:
    """The class of the adapter `answers:DIR:ANSWERS`. AdapterError if DIR has no manifest of ours."""
    folder, _, answers = spec.removeprefix(ANSWERS).partition(":")
    try:
        return kind_of(manifest_of(folder), FilesAdapter, answers)
    except AdapterError:
        raise
    except Exception as error:  # whatever stands in the file
        what = f"{type(error).__name__}: {one_line(error)}"
        raise AdapterError(f"{os.path.join(folder, MANIFEST)} declares what no adapter can: {what}") from error


def manifest_of(folder: str) -> dict[str, Any]:
    """The manifest in a folder. AdapterError if there is none, or if it is no manifest of this format."""
    try:
        file, size = opened(os.path.join(folder, MANIFEST))
        with file:
            if size > MOST_MANIFEST:
                raise WrongFile(f"has {size} bytes, of at most {MOST_MANIFEST}")
            manifest = parsed(file.read(MOST_MANIFEST), fractions=True)
    except FileNotFoundError:
        raise AdapterError(f"{folder} has no {MANIFEST}: gdn-verify export writes it") from None
    except WrongFile as error:
        raise AdapterError(f"{os.path.join(folder, MANIFEST)} {error}") from None
    kinds = {"book": str, "domain": dict, "declares": dict, "profile": str, "seed": int, "cases": list, "questions": dict}
    if not (
        isinstance(manifest, dict)
        and manifest.get("format") == FORMAT
        and all(isinstance(manifest.get(name), kind) for name, kind in kinds.items())
        and all(QUESTION.fullmatch(name) for name in manifest["questions"])
    ):
        raise AdapterError(f"{os.path.join(folder, MANIFEST)} is no manifest of {FORMAT}")
    return manifest
