"""What is misspelt is refused, with what was meant. What an author adds for the kernel is not."""

import pathlib

import pytest

from properties.books import BOOKS, Book
from tests.together import for_each
from verify.adapters.base import Adapter
from verify.adapters.loader import load
from verify.adapters.registry import AdapterError

HEAD = "from tests.right import Chunkwise, Recurrent\nfrom verify import Domain, ModuleDomain, PathAdapter\nclass K(Chunkwise):\n"
RUN = "    def run(self, x):\n        return super().run(x)\n"


def loaded(folder: pathlib.Path, body: str, head: str = HEAD) -> object:
    file = folder / "own_kernel.py"
    file.write_text(head + body)
    return load(f"{file}:K")


@for_each(
    ("body", "message"),
    [
        ("    chunks = 32\n", "K has chunks = 32; did you mean chunk?, or _chunks if it is a helper"),
        ('    algorithmn = "recurrent"\n', "did you mean algorithm?"),
        ('    Algorithm = "recurrent"\n', "did you mean algorithm?"),
        ("    fold = True\n", "did you mean folds?"),
        ("    chunk_size = 64\n", "did you mean chunk?"),
        ("    stores_keys = True\n", "did you mean stores?"),
        ("    round_products = True\n", "did you mean rounds_products?"),
        ('    counter_part = "own.py:K"\n', "did you mean counterpart?"),
        ("    domian = Domain(packed=False)\n", "did you mean domain?"),
        ("    supports = Domain(packed=False)\n", "did you mean domain?"),
        ('    precision = "tf32"\n', "did you mean products?"),
        ('    kind = "recurrent"\n', "did you mean algorithm?"),
        ('    needs = {"triton": "3.7.1"}\n', "did you mean requires?"),
        ("    backward = False\n", "did you mean backward of its domain, Domain(backward=...)?"),
        ("    dtype = ('bf16',)\n", "did you mean dtypes of its domain"),
        ("    def brings(self):\n        import json\n", "K has brings(); did you mean bring?"),
        ("    def __init__(self):\n        self.chunks = 32\n", "did you mean chunk?"),
        ("    def __init__(self):\n        self.backward = False\n", "did you mean backward of its domain, Domain(backward=...)?"),
        ("    chunks = 4\nclass Other(K):\n    chunks = 8\nK = Other\n", "Other has chunks = 8; did you mean chunk?"),
        ("    chunks = 4\n    def run(self, x):\n        return super().run(x) if self.chunks else None\n", "or _chunks if it is"),
        ("    pass\nclass Base(K):\n    algorithmn = 'recurrent'\nK = type('K', (Base,), {})\n", "did you mean algorithm?"),
    ],
)  # fmt: skip
def test_a_misspelt_declaration_is_refused_with_what_was_meant(body: str, message: str, tmp_path: pathlib.Path) -> None:
    with pytest.raises(AdapterError) as error:
        loaded(tmp_path, body)
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_what_only_another_kind_of_adapter_has_is_refused(tmp_path: pathlib.Path) -> None:
    with pytest.raises(AdapterError, match="only Adapter has it, and this is PathAdapter: leave it out"):
        loaded(tmp_path, "class K(PathAdapter):\n    folds = True\n    def run(self, x, place): ...\n", HEAD.rpartition("class")[0])


@for_each(
    "body",
    [
        "    most = 65535\n",
        f"    stale = False\n{RUN}",
        f"    num_warps = 4\n    name = 'mine'\n    blocks = (16, 32)\n    experimental = True\n{RUN}",
        f"    chunks = 4\n    chunk = 16 * chunks\n{RUN}",
        f"    chunk = 64\n    chunks = 4\n{RUN}",
        f"    _chunks = 4\n{RUN}",
        f"    algorithm = 'chunkwise'\n    kind = 'chunkwise'\n{RUN}",
        f"    def __init__(self):\n        self._chunks = 4\n        self.many = self._chunks > 2\n{RUN}",
        "    def moved(self, x):\n        return x\n    def run(self, x):\n        return super().run(self.moved(x))\n",
        f"    operation = 'gated_delta_rule'\n    Recurrent = Recurrent\n{RUN}",
        f"    backward = True\n{RUN}",
        f"    def __init__(self):\n        self.dtype = 'bf16'\n{RUN}",
        f"    backward = False\n{RUN}class Other(K):\n    backward = True\nK = Other\n",
    ],
)
def test_what_an_author_adds_for_the_kernel_is_not_refused(body: str, tmp_path: pathlib.Path) -> None:
    assert isinstance(loaded(tmp_path, body), Adapter)


@for_each("book", BOOKS)
def test_a_misspelt_field_of_a_domain_is_refused_with_the_nearest(book: Book) -> None:
    with pytest.raises(
        TypeError, match=rf"{book.domain.__name__} has no field 'operatoin' \(did you mean operation\?\); there are "
    ):
        book.domain(operatoin="x")
    with pytest.raises(TypeError, match=r"has no field 'colour'; there are operation, "):
        book.domain(colour="red")
    assert book.domain() == book.domain(operation=book.domain().operation)


def test_a_misspelt_field_in_a_file_is_refused_in_one_line(tmp_path: pathlib.Path) -> None:
    with pytest.raises(
        AdapterError, match=r"own_kernel.py failed: TypeError: Domain has no field 'dtype' \(did you mean dtypes\?\)"
    ):
        loaded(tmp_path, "    domain = Domain(dtype=('bf16',))\n")
