"""Mutation: edits are what they say, mutants of real and of planted kernels are killed, and what cannot be seen is shown."""

import ast
import collections
import dataclasses
import json
import pathlib
import re
import subprocess
from typing import Any

import pytest

from tests.alone import told
from tests.needs import need
from tests.together import for_each
from verify.execution.line import Run
from verify.findings import known
from verify.zoo.edits import OPERATORS, dedented, edits
from verify.zoo.launch_edits import Kernel
from verify.zoo.mutants import Mutant, MutantFate
from verify.zoo.mutation import argue, description, left_out, sampled, summary, table

SLOW_FIXTURES = ("toys",)

pytestmark = pytest.mark.interpreted

ROOT = pathlib.Path(__file__).resolve().parents[2]

SOURCE = '''
@triton.jit
def toy(
    q,  # a comment with an umlaut: ä
    o,
    T,
    H: tl.constexpr,
    HV: tl.constexpr,
    USE_G: tl.constexpr,
):
    """A docstring with 1 + 1."""
    i_t, i_h = tl.program_id(0).to(tl.int64), tl.program_id(1)
    q += i_h // (HV // H)
    m_t = i_t < T
    m_k = m_t & (i_h < H)
    b_h1 = tl.load(q + i_t * 2, mask=m_t, other=0.0).to(tl.float32)
    b_h2 = tl.load(q, boundary_check=(0,))
    if USE_G:
        b_h1 *= exp2(b_h2 - 1e-6)
    for i in range(T):
        b_h2 += tl.dot(b_h1, tl.trans(b_h2), b_h1)
    b_h2 = -tl.where(m_t, tl.sum(b_h1, 0), tl.cumsum(b_h2, axis=0))
    tl.store(o, b_h2.to(o.dtype.element_ty), mask=m_t)
'''
TOY = dedented(SOURCE.lstrip("\n").splitlines(keepends=True))
# line of the toy, operator, and what stands there then
WANTED = """
10 constant: tl.program_id(1).to(tl.int64), tl.program_id(1)
10 integer cast: i_t, i_h = tl.program_id(0), tl.program_id(1)
11 accumulation: pass
11 accumulation: q -= i_h
11 head map: q += i_h % (HV // H)
11 head map: q += (i_h % H)
11 head map: q += i_h
11 index name: q += i_t // (HV // H)
11 width name: (H // H)
12 comparison: i_t <= T
13 mask: m_k = m_t
13 mask: m_k = (i_h < H)
14 cast: other=0.0)
14 cast: .to(tl.bfloat16)
14 constant: other=1.0
14 constant: i_t * 3
14 factor: tl.load(q + 2,
14 factor: tl.load(q + i_t,
14 mask: mask=m_k
14 mask removed: tl.load(q + i_t * 2).to
14 sign: tl.load(q - i_t
14 term: tl.load(q, mask
15 boundary check: b_h2 = tl.load(q)
16 flag: if not USE_G:
17 accumulation: pass
17 constant: b_h2 - 1e-05
17 exponential: tl.exp(b_h2
17 operands: (1e-6 - b_h2)
17 sibling: exp2(b_h1
17 sign: b_h2 + 1e-6
17 term: exp2(b_h2)
17 term: (-1e-6)
18 loop bound: range(T - 1)
19 accumulation: b_h2 -=
19 accumulator: tl.trans(b_h2))
19 operands: tl.dot(tl.trans(b_h2), b_h1, b_h1)
19 transpose: tl.dot(b_h1, b_h2, b_h1)
20 axis: tl.sum(b_h1, 1)
20 reverse: tl.cumsum(b_h2, axis=0, reverse=True)
20 sign: b_h2 = tl.where
20 where: tl.where(m_t, tl.cumsum(b_h2, axis=0), tl.sum(b_h1, 0))
20 where: -tl.sum(b_h1, 0)
21 mask removed: element_ty))
21 store: pass
"""


def test_edits_of_a_toy_are_those_that_hands_make() -> None:
    found = [(edit.line, edit.operator, "\n".join(edit.lines(TOY)[2])) for edit in edits(TOY)]
    for line in WANTED.strip().splitlines():
        number, operator, text = re.fullmatch(r"(\d+) ([a-z ]+): (.*)", line).groups()  # type: ignore[union-attr]
        alike = [new for at, kind, new in found if (at, kind) == (int(number), operator)]
        assert any(text in new for new in alike), (line, alike)


def test_edits_are_python_that_differs_and_none_is_made_twice() -> None:
    toy_edits = edits(TOY)
    texts = [edit.of(TOY) for edit in toy_edits]
    plain = ast.dump(ast.parse(TOY))
    assert all(ast.dump(ast.parse(text)) != plain for text in texts)
    assert len(set(texts)) == len(texts)
    assert edits(TOY) == toy_edits
    assert {edit.operator for edit in toy_edits} <= set(OPERATORS)


@for_each(
    ("line", "operator"),
    [(8, "constant"), (9, "sign"), (14, "operands"), (21, "cast"), (11, "axis"), (20, "constant")],
)
def test_what_no_run_could_show_is_left_alone(line: int, operator: str) -> None:
    assert (line, operator) not in {(edit.line, edit.operator) for edit in edits(TOY)}


def test_pointer_keeps_its_base() -> None:
    assert not [edit for edit in edits(TOY) if "tl.load((i_t * 2)" in edit.of(TOY)]


@for_each("source", ["x = 1\n", "def f(): pass\ndef g(): pass\n", "class A: pass\n"])
def test_edits_of_what_is_no_function_are_refused(source: str) -> None:
    with pytest.raises(ValueError, match="source must be one function, got"):
        edits(source)


def mutants_of(source: str, first: int = 30) -> list[Mutant]:
    kernel = Kernel("toy", "package/toy.py", first, source, None)
    return [Mutant(number, kernel, edit) for number, edit in enumerate(edits(source))]


def test_diff_is_one_that_patch_takes(tmp_path: pathlib.Path) -> None:
    before = "# above\n" * 29 + TOY
    file = tmp_path / "package" / "toy.py"
    file.parent.mkdir()
    for mutant in mutants_of(TOY)[::9]:
        file.write_text(before, encoding="utf-8")
        subprocess.run(
            ["git", "apply", "--unidiff-zero", "-"],
            cwd=tmp_path,
            input=mutant.diff + "\n",
            text=True,
            check=True,
            capture_output=True,
        )
        assert file.read_text(encoding="utf-8") == "# above\n" * 29 + mutant.edit.of(TOY)


def test_edit_over_several_lines_is_shown_whole() -> None:
    source = "def f(a, b):\n    x = tl.dot(\n        a,\n        b,\n    )\n"
    swapped = next(edit for edit in edits(source) if edit.operator == "operands")
    assert swapped.lines(source) == (3, ["        a,", "        b,"], ["        b, a,"])


def test_edit_in_a_branch_of_an_expression_belongs_to_the_branch() -> None:
    source = "def f(a, b, FLAG):\n    x = (a + 1 if FLAG > 3 else b - (2 if a else b)) * 5\n"
    begin = source.index("    x")
    parts = {part: source.index(part) for part in ("2 if", "a + 1", "b - (2 if a else b)")}  # an inner one first
    seen = set()
    for edit in edits(source):
        at = next((at for part, at in parts.items() if at <= edit.start and edit.end <= at + len(part.removesuffix(" if"))), begin)
        assert (edit.line, edit.column) == (2, at - begin), edit
        seen.add(edit.column)
    assert len(seen) == 4


def test_ids_tell_another_source() -> None:
    ids = [mutant.id for mutant in mutants_of(TOY)]
    assert len(set(ids)) == len(ids)
    assert ids == [mutant.id for mutant in mutants_of(TOY)]
    other = [mutant.id for mutant in mutants_of(TOY.replace("i_t * 2", "i_t * 4"))]
    assert ids != other and ids[0].startswith("0000.")


def test_sample_has_the_shares_of_all() -> None:
    mutants = mutants_of(TOY)
    chosen = sampled(mutants, len(mutants) // 4, seed=3)
    assert chosen == sampled(mutants, len(mutants) // 4, seed=3) != sampled(mutants, len(mutants) // 4, seed=4)
    assert chosen == sorted(set(chosen), key=lambda mutant: mutant.number) and len(chosen) == len(mutants) // 4
    counts = collections.Counter(mutant.edit.operator for mutant in mutants)
    drawn = collections.Counter(mutant.edit.operator for mutant in chosen)
    assert all(abs(drawn[operator] - count / 4) <= 1 for operator, count in counts.items())
    assert sampled(mutants, len(mutants) + 1, seed=0) == mutants


def test_arguments_are_found_by_kernel_and_line_and_version(tmp_path: pathlib.Path) -> None:
    mutant = next(mutant for mutant in mutants_of(TOY) if mutant.edit.operator == "mask removed")
    group = {"class": "redundant", "reason": "because", "versions": {}, "edits": [["toy", *mutant.changed]]}
    file = tmp_path / "equivalent.json"
    for change, found in (
        ({}, "redundant"),
        ({"versions": {"no-such-distribution": ["1"]}}, ""),
        ({"edits": [["other", *mutant.changed]]}, ""),
        ({"edits": [["toy", *mutant.changed[::-1]]]}, ""),
        ({"adapters": ["fla/chunk"]}, "redundant"),
        ({"adapters": ["fla/chunk_kda", "fla/conv"]}, ""),
    ):
        file.write_text(json.dumps([group | change]), encoding="utf-8")
        fate = MutantFate(mutant, "survived")
        argue([fate], "fla/chunk", file)
        assert fate.argued == found
    killed = MutantFate(mutant, "killed", "cut", "is not finite", "law=cut ...")
    file.write_text(json.dumps([group]), encoding="utf-8")
    argue([killed], "fla/chunk", file)
    assert (
        description(killed).startswith("REFUTED")
        and "law=cut" in description(killed)
        and "argued: redundant" in description(killed)
    )
    assert "1 of 1 mutants killed" in summary([killed])


def test_arguments_on_file_are_complete() -> None:
    groups = json.loads((ROOT / "verify" / "zoo" / "equivalent.json").read_text(encoding="utf-8"))
    for group in groups:
        assert set(group) - {"adapters"} == {"class", "reason", "versions", "edits"} and group["reason"] and group["edits"]
        assert all(old != new for _, old, new in group["edits"])
    every = [tuple(edit) for group in groups for edit in group["edits"]]
    assert len(set(every)) == len(every)


def test_cases_of_a_known_defect_are_left_out_by_their_number(monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run.parse("law=oracle adapter=fla/conv lengths=1 op=causal_conv1d width=1 conv_width=1")
    defect = known.Known(run, {}, {"oldest": "yes"}, "the oldest column is lost")
    monkeypatch.setattr(known, "load", lambda: known.KnownDefects([defect]))
    other = "law=oracle adapter=fla/conv lengths=1 op=causal_conv1d width=1 conv_width=1 oldest=no"
    lines = left_out([str(defect.run), other, str(defect.run)])
    assert lines == [
        f"left out, because the unchanged kernels break it: {other}",
        "left out, 2 cases of a known defect: the oldest column is lost",
    ]
    assert left_out([]) == []


def test_summary_counts_crashes_apart() -> None:
    mutants = mutants_of(TOY)
    fates = [
        MutantFate(mutants[0], "killed", "oracle", "is not finite", cases=1, seconds=1.0),
        MutantFate(mutants[1], "killed", "cut", "crashed: SIGSEGV", cases=9, seconds=3.0),
        MutantFate(mutants[2], "survived", ran=4, differed=2),
        MutantFate(mutants[3], "survived", argued="redundant", reason="because"),
        MutantFate(mutants[4]),
    ]
    text = summary(fates)
    assert "2 of 3 mutants killed (66.7%), and 1 survivors with an argument that they are no defects: redundant 1" in text
    assert "without those that crash, hang or raise, 1 of 2" in text
    assert "median case 5, 2.0 s" in text and "the last at case 9" in text
    assert "4 cases run it, 2 of them with other bits" in description(fates[2])
    assert "argued: redundant: because" in description(fates[3])
    rows = {line.split()[0]: line.split()[1:] for line in table(fates, mutants, mutants[5:]).splitlines() if line}
    assert rows["toy"] == [str(len(mutants)), str(len(mutants) - 5), "5", "2", "1", "1", "-"]


# Kernels that run. The adapter is right; each line of them is there for a mutant of it.
KERNELS = '''
import triton
import triton.language as tl
import torch
from verify import Domain
from verify.zoo.base import Chunkwise

WIDE = tl.constexpr(1 << 44)


@triton.jit
def passed(x, y, n, BLOCK: tl.constexpr, NEVER: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < n
    b = tl.load(x + at, mask=inside, other=0.0)
    turns = 0
    while turns < BLOCK:
        turns += BLOCK
    if NEVER:
        b = b * 3.0
    b = b * 5.0 if NEVER else b * 1.0
    there = (y.to(tl.int64) + (at * WIDE) // WIDE * 4).to(tl.pointer_type(tl.float32))
    tl.store(there, b, mask=inside)


class Passes(Chunkwise):
    """v goes through a kernel that copies it."""

    domain = Domain(
        dtypes=("fp32",), gate_dtypes=("fp32",), key_dims=(1, 8), value_dims=(1, 8), packed=False, initial_state=False,
        qk_norm=False, scale=False, negative_eigenvalues=False, views=False, backward=False, grouped_heads=False,
    )

    def run(self, x):
        v = torch.empty_like(x.v)
        if v.numel():
            passed[(triton.cdiv(v.numel(), 64),)](x.v, v, v.numel(), BLOCK=64, NEVER=False)
        return super().run(x.replaced(v=v))


class NoKernel(Chunkwise):
    """It launches nothing."""

    domain = Passes.domain


@triton.jit
def gathered(x, y, T, batch_step, token_step, head_step, HV: tl.constexpr, V: tl.constexpr):
    row, head = tl.program_id(0), tl.program_id(1).to(tl.int64)
    sequence = (row // T).to(tl.int64)
    token = (row % T).to(tl.int64)
    at = tl.arange(0, V)
    b = tl.load(x + sequence * batch_step + token * token_step + head * head_step + at)
    tl.store(y + (row * HV + head) * V + at, b)


class Gathers(Chunkwise):
    """v goes through a kernel that reads it by its strides."""

    domain = Domain(
        dtypes=("fp32",), gate_dtypes=("fp32",), key_dims=(1, 8), value_dims=(8, 8), packed=False, initial_state=False,
        qk_norm=False, scale=False, negative_eigenvalues=False, backward=False, grouped_heads=False, empty=False,
    )

    def run(self, x):
        v = torch.empty(x.v.shape)
        rows, heads = x.v.shape[0] * x.v.shape[1], x.v.shape[2]
        strided = x.v if x.v.stride(3) == 1 else x.v.contiguous()
        gathered[(rows, heads)](strided, v, x.v.shape[1], *strided.stride()[:3], HV=heads, V=8)
        return super().run(x.replaced(v=v))
'''
DRIVER = """
import contextlib, io, os
from verify.cli.main import main
from verify.engine.profiles import PROFILES
from verify.zoo import mutation

every = mutation.runs_by_law

def runs_by_law(spec, domain, profile):
    if not spec.endswith(":Gathers"):
        return every(spec, domain, profile)
    runs = every(spec, domain, PROFILES["quick"])  # two cases of a law are seldom far views
    return [run for run in runs if str(run.example.variant).startswith("far_")]

mutation.runs_by_law = runs_by_law
os.chdir(folder)
codes, outputs, errors = [], [], io.StringIO()
for arguments in commands:
    with contextlib.redirect_stdout(io.StringIO()) as output, contextlib.redirect_stderr(errors):
        codes.append(main(["zoo", "--mutate", *arguments]))
    outputs.append(output.getvalue())
told = [codes, outputs, errors.getvalue()]
"""


def drive(*commands: list[str], folder: pathlib.Path) -> tuple[list[int], list[str], str]:
    """The exit codes and outputs of several commands in one process, and all of stderr."""
    codes, outputs, errors = told(DRIVER, commands=commands, folder=str(folder))
    return codes, outputs, errors


@dataclasses.dataclass
class Toys:
    """What became of the planted kernels' mutants."""

    codes: list[int]
    outputs: list[str]
    errors: str
    fates: list[dict[str, Any]]
    source: str
    far: list[dict[str, Any]]

    def fate(self, new: str) -> dict[str, Any]:
        (found,) = [fate for fate in self.fates if fate["diff"].splitlines()[-1].strip("+ ") == new]
        return found


@pytest.fixture(scope="module")
def toys(tmp_path_factory: pytest.TempPathFactory) -> Toys:
    pytest.importorskip("triton")
    folder = tmp_path_factory.mktemp("mutation")
    (folder / "kernels.py").write_text(KERNELS, encoding="utf-8")
    few = ["--profile", "least", "--deadline", "1"]
    codes, outputs, errors = drive(
        ["kernels.py:Passes", *few, "--json", "all.jsonl"],
        ["kernels.py:Passes", "--list"],
        ["kernels.py:Passes", *few, "--grep", "b = b . 3"],
        ["kernels.py:Passes", *few, "--id", "9999.0000"],
        ["kernels.py:Passes", *few, "--grep", "at < n .*at <= n|store: "],
        ["kernels.py:NoKernel", *few],
        ["gdn/layer", *few],
        ["kernels.py:Passes", *few, "--json", "no/such/folder"],
        ["kernels.py:Gathers", *few, "--grep", "integer cast", "--json", "far.jsonl"],
        folder=folder,
    )
    fates, far = (
        [json.loads(line) for line in (folder / f"{name}.jsonl").read_text(encoding="utf-8").splitlines()]
        for name in ("all", "far")
    )
    return Toys(codes, outputs, errors, fates, (folder / "kernels.py").read_text(encoding="utf-8"), far)


@pytest.mark.slow
def test_wrong_kernels_are_killed(toys: Toys) -> None:
    for new in ("pass", "b = b * 5.0 if NEVER else 1.0", "b = tl.load(x, mask=inside, other=0.0)"):
        alike = [fate for fate in toys.fates if fate["diff"].splitlines()[-1].strip("+ ") == new]
        assert alike and all(fate["state"] == "killed" for fate in alike)
    stored = next(fate for fate in toys.fates if fate["operator"] == "store")
    assert (stored["state"], stored["law"], stored["how"], stored["differed"]) == ("killed", "oracle", "is not finite", 1)
    assert stored["run"].startswith("law=oracle adapter=kernels.py:Passes lengths=") and stored["cases"] >= 1


def test_kernel_that_hangs_is_killed_by_the_deadline(toys: Toys) -> None:
    lost = next(fate for fate in toys.fates if fate["operator"] == "accumulation" and "+        pass" in fate["diff"])
    assert (lost["state"], lost["how"]) == ("killed", "hung")


def test_kernel_that_crashes_is_killed(toys: Toys) -> None:
    fate = toys.fate("there = (y.to(tl.int64) + (at * WIDE) * 4).to(tl.pointer_type(tl.float32))")
    assert (fate["state"], fate["how"]) == ("killed", "crashed: SIGSEGV")


def test_kernel_that_raises_is_killed(toys: Toys) -> None:
    raised = [fate for fate in toys.fates if fate["how"].startswith("raised")]
    assert raised and all(fate["state"] == "killed" for fate in raised)


def test_mutant_that_changes_nothing_survives_and_is_shown(toys: Toys) -> None:
    fate = toys.fate("b = tl.load(x + at, mask=inside, other=1.0)")
    assert (fate["state"], fate["differed"]) == ("survived", 0) and fate["ran"] > 20
    description = toys.outputs[0]
    assert f"SURVIVED    {fate['id']}  constant" in description
    line = toys.source.splitlines().index(fate["diff"].splitlines()[-2][1:]) + 1
    assert f"@@ -{line},1 +{line},1 @@ passed" in description and fate["line"] == line
    assert toys.codes[0] == 1


def test_access_outside_of_a_tensor_is_killed_though_it_changes_no_bit(toys: Toys) -> None:
    for new in ("b = tl.load(x + at)", "inside = at <= n"):
        fate = toys.fate(new)
        assert (fate["state"], fate["how"]) == ("killed", "raised OutOfBounds")


def test_offset_of_32_bits_is_killed_by_a_launch_that_cannot_be_repeated(toys: Toys) -> None:
    """A far view spans 8 GiB or more, so that the launch is recorded without its memory and the law runs at once."""
    killed = [fate for fate in toys.far if fate["state"] == "killed"]
    assert killed
    assert all((fate["law"], fate["differed"]) == ("strides", 0) and "variant=far_" in fate["run"] for fate in killed)


def test_statement_that_no_call_runs_has_no_mutant(toys: Toys) -> None:
    never = [fate for fate in toys.fates if "b * 3.0" in fate["diff"]]
    never += [toys.fate(f"b = {dead} if NEVER else b * 1.0") for dead in ("b", "5.0", "b * 1.0")]
    assert len(never) == 6 and all(fate["state"] == "uncovered" for fate in never)
    listed = [line for line in toys.outputs[1].splitlines() if line.endswith("(no call runs it)")]
    assert sorted(line.split()[0] for line in listed) == sorted(fate["id"] for fate in never)


def test_ids_are_the_same_in_every_run(toys: Toys) -> None:
    listed = {line.split()[0] for line in toys.outputs[1].splitlines()}
    assert listed == {fate["id"] for fate in toys.fates}


def test_usage_that_cannot_be_is_refused(toys: Toys) -> None:
    assert toys.codes[1:8] == [0, 2, 2, toys.codes[4], 2, 2, 2]
    assert "--json must name a file that can be written, got 'no/such/folder'" in toys.errors
    assert "grep must match what --list prints of a mutant, got 'b = b . 3'" in toys.errors
    assert "id must be one that --list prints for the installed source, such as 0000." in toys.errors
    assert "kernels.py:NoKernel launches no kernel in Triton's language" in toys.errors
    assert "adapter gdn/layer is a path that ranks share" in toys.errors


def test_some_are_computed_alone(toys: Toys) -> None:
    checked = re.search(r"; (\d+) are checked", toys.outputs[4])
    assert checked is not None and int(checked[1]) == 2


SMALL = """
from verify.adapters.fla import Chunk
from verify import Domain

class Small(Chunk):
    domain = Domain(
        dtypes=("fp32",), key_dims=(16, 32), value_dims=(16, 32), packed=False, in_kernel=("none",), qk_norm=False, scale=False,
        initial_state=False, views=False,
    )
"""


@pytest.mark.slow
def test_mutants_of_released_kernels_are_killed(tmp_path: pathlib.Path) -> None:
    """A head map, a boundary of tokens and a dropped term of a gradient, each in another kernel."""
    need("fla")
    (tmp_path / "small.py").write_text(SMALL, encoding="utf-8")
    wanted = (
        r"chunk_fwd_kernel_o head map: v|chunk_fwd_kernel_o head map: q \+= \(bos \* H \+ i_h // \(HV // H\)\) \* K -> .*i_h % H\)",
        r"recompute_w_u_fwd_kernel comparison: m_t = o_t < T",
        r"prepare_wy_repr_bwd_kernel accumulation: b_db \+= tl.sum\(b_dvb \* b_v, 1\) -> pass",
    )
    command = ["small.py:Small", "--grep", "|".join(f"(?:{edit})" for edit in wanted), "--json", "fla.jsonl", "--profile", "least"]
    (code,), (output,), errors = drive(command, folder=tmp_path)
    fates = [json.loads(line) for line in (tmp_path / "fla.jsonl").read_text(encoding="utf-8").splitlines()]
    covered = [fate for fate in fates if fate["state"] != "uncovered"]
    assert len(covered) == 3, output
    assert code == 0, (output, errors)
    assert {fate["state"] for fate in covered} == {"killed"} and {fate["law"] for fate in covered} == {"oracle"}
