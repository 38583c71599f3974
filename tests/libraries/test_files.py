"""Questions and answers in files: what is written, what answers lead to, and files that nobody should believe."""

import io
import json
import os
import pathlib
import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from properties.books import book_of, every_law
from properties.layers.domain import LayerDomain
from properties.modules.domain import ModuleDomain
from properties.pools.domain import PoolDomain
from properties.rules.domain import Domain
from tests import process_server
from tests.files_kernels import example, wrong
from verify.adapters.files_adapter import FilesAdapter, Writer, kind_of, manifest_of
from verify.adapters.registry import AdapterError
from verify.adapters.tensor_files import MANIFEST, WrongFile, memory_of, read, write
from verify.cli.exits import BROKEN, HOLDS, UNDECIDED, USAGE
from verify.cli.main import main
from verify.engine.drawing import of_law
from verify.execution.execute import execute
from verify.execution.exporting import EXPORTED, questions_of
from verify.execution.line import Run
from verify.process.outcome import FailureKind, Verdict

KERNELS = "tests/files_kernels.py:"
LEAST = ("--profile", "least")
LAWS = ("--law", "oracle", "--law", "future")
KEPT = ("--law", "oracle", "--law", "permuted", "--law", "heads")


@pytest.fixture(scope="module")
def questions(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    folder = tmp_path_factory.mktemp("files") / "questions"
    assert main(["export", f"{KERNELS}Elsewhere", "--out", str(folder), *LEAST, *KEPT]) == HOLDS
    return folder


@pytest.fixture(scope="module")
def answers(questions: pathlib.Path) -> pathlib.Path:
    folder = questions.parent / "answers"
    example().main(questions, folder)
    return folder


@pytest.fixture
def some(questions: pathlib.Path, answers: pathlib.Path, tmp_path: pathlib.Path) -> tuple[Run, pathlib.Path]:
    """A line whose question is one call of few numbers, and the file of its answer in a folder of its own."""
    cases = [case for case in manifest_of(str(questions))["cases"] if case["law"] == "oracle"]
    lines = {case["line"]: case["questions"] for case in cases}
    line = min(lines, key=lambda line: sum((answers / f"{name}.safetensors").stat().st_size for name in lines[line]))
    for name in lines[line]:
        (tmp_path / f"{name}.safetensors").write_bytes((answers / f"{name}.safetensors").read_bytes())
    spec = f"adapter=answers:{questions}:{tmp_path}"
    return Run.parse(line.replace(f"adapter={KERNELS}Elsewhere", spec)), tmp_path / f"{lines[line][0]}.safetensors"


def test_the_lines_are_those_that_a_check_draws(questions: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    capsys.readouterr()
    assert main(["draw", f"{KERNELS}Elsewhere", *LEAST, *KEPT, "--device", "cpu", "--seed", "0"]) == HOLDS
    drawn = capsys.readouterr().out.splitlines()
    manifest = manifest_of(str(questions))
    assert [case["line"] for case in manifest["cases"]] == drawn
    assert {name for case in manifest["cases"] for name in case["questions"]} == manifest["questions"].keys()
    assert {f"{name}.safetensors" for name in manifest["questions"]} | {MANIFEST} == {path.name for path in questions.iterdir()}


def test_a_question_says_all_that_an_answer_needs(questions: pathlib.Path) -> None:
    told = manifest_of(str(questions))["questions"]
    for path in questions.glob("*.safetensors"):
        question, tensors = example().read(path)
        assert question == told[path.stem]
        assert [(entry["name"], entry["shape"]) for entry in question["inputs"]] == [(n, [*x.shape]) for n, x in tensors.items()]
        assert not {"o", "final_state"} & tensors.keys(), "no expected value is written"


DOMAINS = (
    Domain(),
    Domain(operation="kda", in_kernel=("none", "both")),
    ModuleDomain(),
    ModuleDomain("gdn_gate"),
    ModuleDomain("l2norm"),
    ModuleDomain("gated_rms_norm"),
    PoolDomain(rule=Domain(backward=False)),
    LayerDomain(),
)


class Ones(Writer):
    """Answers ones where a Writer answers zeros."""

    def _answered(self, *question: Any) -> list[torch.Tensor]:
        return [x.fill_(1) for x in super()._answered(*question)]


def names_of(law: str, domain: Any, base: type[Writer], folder: pathlib.Path) -> list[list[str]]:
    book = book_of(domain)
    folder.mkdir(exist_ok=True)
    manifest = {"book": book.name, "domain": domain.to_json(), "declares": {"algorithm": "pointwise"}}
    writer = kind_of(manifest, base, str(folder))()
    assert isinstance(writer, Writer)
    drawn: list[Any] = []
    of_law(book.laws[law], domain, 0, 3, drawn.append)
    return [questions_of(Run(law, "-", example), writer) for example in drawn]


@pytest.mark.parametrize("domain", DOMAINS, ids=lambda domain: f"{domain.operation}-{DOMAINS.index(domain)}")
def test_what_is_asked_does_not_depend_on_answers(domain: Any, tmp_path: pathlib.Path) -> None:
    about = [law for law in book_of(domain).about(domain.operation) if law in EXPORTED]
    assert {*EXPORTED} <= {*every_law()}
    laws = [law for law in about if book_of(domain).laws[law].needs(domain) is None]
    assert "oracle" in laws
    for law in laws:
        asked = names_of(law, domain, Writer, tmp_path / "zeros")
        assert asked == names_of(law, domain, Ones, tmp_path / "ones"), law
        assert all(asked), law


WORDS = {"F64": "fp64", "F32": "fp32", "F16": "fp16", "BF16": "bf16", "I32": "int32", "I64": "int64", "BOOL": "bool"}


def answer_by(spec: str, questions: pathlib.Path, answers: pathlib.Path) -> None:
    """Answer a folder with an adapter."""
    answers.mkdir()
    for path in questions.glob("*.safetensors"):
        question, tensors = example().read(path)
        heads = [
            " ".join(f"{e['name']} {WORDS[e['dtype']]} {len(e['shape'])} {' '.join(map(str, e['shape']))}" for e in question[part])
            for part in ("inputs", "outputs")
        ]
        options = " ".join(f"{name}={value}" for name, value in question["options"].items())
        body = io.BytesIO(b"".join(bytes(memory_of(x.contiguous())) for x in tensors.values()))
        found = process_server.answer(f"{question['word']} {heads[0]} ; {heads[1]} ; {options} adapter={spec}", body)
        example().write(answers / path.name, {e["name"]: x.detach() for e, x in zip(question["outputs"], found, strict=True)})


ANIMALS = {
    "zoo/TailWithoutGate": ("packed", "absent", "linear"),
    "zoo/StateTransposed": ("recall",),
    "zoo/SeesFutureGates": ("future",),
    "zoo/PaddingIsLast": ("untouched", "padding"),
    "zoo/IgnoresBeginnings": ("fresh",),
    "zoo/PadsNotMasked": ("left_padding",),
}


@pytest.mark.slow
@pytest.mark.parametrize("spec", ANIMALS)
def test_answers_of_a_wrong_implementation_have_the_verdicts_of_the_implementation(spec: str, tmp_path: pathlib.Path) -> None:
    laws = [word for law in ANIMALS[spec] for word in ("--law", law)]
    assert main(["export", spec, "--out", str(tmp_path / "q"), "--profile", "few", *laws]) == HOLDS
    answer_by(spec, tmp_path / "q", tmp_path / "a")
    broken = set[str]()
    for case in manifest_of(str(tmp_path / "q"))["cases"]:
        own = execute(Run.parse(case["line"]))
        found = execute(Run.parse(case["line"].replace(f"adapter={spec}", f"adapter=answers:{tmp_path / 'q'}:{tmp_path / 'a'}")))
        assert (found.verdict, [x.place for x in found.findings]) == (own.verdict, [x.place for x in own.findings]), case["line"]
        broken |= {case["law"]} if own.verdict is Verdict.BROKEN else set()
    assert broken == {*ANIMALS[spec]}


def test_questions_of_a_cut_depend_on_answers(tmp_path: pathlib.Path) -> None:
    assert names_of("cut", Domain(), Writer, tmp_path / "zeros") != names_of("cut", Domain(), Ones, tmp_path / "ones")
    assert main(["export", f"{KERNELS}Elsewhere", "--out", str(tmp_path / "cut"), "--law", "cut"]) == USAGE


def judged(capsys: pytest.CaptureFixture[str], *words: str | pathlib.Path) -> tuple[int, list[dict[str, Any]], str]:
    capsys.readouterr()
    code = main([*map(str, words), "--json", "-"])
    out, err = capsys.readouterr()
    return code, [json.loads(line) for line in out.splitlines()], err


def test_right_answers_hold(
    questions: pathlib.Path, answers: pathlib.Path, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, lines, err = judged(capsys, "judge", questions, answers, "--findings", tmp_path, "--workers", "1")
    laws = {line["law"]: line for line in lines if line["record"] == "law"}
    assert (code, {law["verdict"] for law in laws.values()}) == (HOLDS, {"holds"}), lines
    assert "0 missing" in err
    total = sum(sum(law["counts"].values()) for law in laws.values())
    assert total == len(manifest_of(str(questions))["cases"])


def test_wrong_answers_are_broken_with_the_lines_of_a_check(
    questions: pathlib.Path, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    wrong(example()).main(questions, tmp_path / "wrong")
    own = ("--findings", tmp_path / "found", "--workers", "1")
    code, lines, _ = judged(capsys, "judge", questions, tmp_path / "wrong", *own)
    check = judged(capsys, "check", f"{KERNELS}Wrong", *LEAST, *KEPT, "--device", "cpu", "--no-examples", *own)
    assert code == check[0] == BROKEN
    found, expected = (
        {
            line["law"]: (line["verdict"], line["first_run"] and Run.parse(line["first_run"]).everywhere, line["first_findings"])
            for line in record
            if line["record"] == "law"
        }
        for record in (lines, check[1])
    )
    assert found == expected
    assert found["oracle"][0] == "broken"
    broken = next(line for line in lines if line["record"] == "law" and line["verdict"] == "broken")
    assert main(["repeat", broken["run"], "--findings", str(tmp_path / "found")]) == BROKEN, "the line repeats it"


def test_what_is_missing_is_undecided(
    questions: pathlib.Path, answers: pathlib.Path, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    names = sorted(path.name for path in answers.iterdir())
    for name in names[1:]:
        (tmp_path / name).write_bytes((answers / name).read_bytes())
    code, lines, err = judged(capsys, "judge", questions, tmp_path, "--findings", tmp_path.parent / "found", "--workers", "1")
    assert code == UNDECIDED
    assert f"answers      {len(names) - 1} of {len(names)}, 1 missing: {names[0]}" in err
    reasons = [line["reason"] for line in lines if line["record"] == "law" and line["verdict"] == "unknown"]
    assert reasons and all(f"no answer: {names[0]}" in reason for reason in reasons)


def test_an_export_goes_on_and_another_one_is_refused(
    questions: pathlib.Path, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    whole = {path.name: path.read_bytes() for path in questions.iterdir()}
    folder, first, second, third = tmp_path / "part", *sorted(whole)[:3]
    folder.mkdir()
    for name in {*whole} - {first}:
        (folder / name).write_bytes(whole[name])
    (folder / second).write_bytes(whole[second][:-1])
    (folder / third).write_bytes(whole[third][:-1] + bytes([whole[third][-1] ^ 1]))
    (folder / f"{first}.part").write_bytes(b"of a process that was killed")
    outside = tmp_path / "outside"
    outside.write_bytes(b"")
    (folder / f"{second}.part").symlink_to(outside)
    kept = (folder / sorted(whole)[4]).stat().st_mtime_ns
    command = ["export", f"{KERNELS}Elsewhere", "--out", str(folder), *LEAST, *KEPT]
    assert main(command) == HOLDS
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == whole
    assert (folder / sorted(whole)[4]).stat().st_mtime_ns == kept, "what is there is not written again"
    assert outside.read_bytes() == b""
    capsys.readouterr()
    assert main([*command, "--seed", "1"]) == USAGE
    assert capsys.readouterr().err == f"gdn-verify: {folder} has another export: its seed is not the same; name another folder\n"
    (folder / MANIFEST).unlink()
    assert main(command) == USAGE
    assert "has files, but no manifest.json" in capsys.readouterr().err


def test_the_files_are_those_of_the_package(tmp_path: pathlib.Path) -> None:
    package = pytest.importorskip("safetensors.torch")
    tensors = {
        "a": torch.randn(3, 4),
        "b": torch.randn(5).bfloat16(),
        "none": torch.empty(0, 3),
        "i": torch.arange(3, dtype=torch.int32),
        "h": torch.randn(2, 1).half(),
    }
    must = {name: (x.dtype, x.shape) for name, x in tensors.items()}
    write(str(tmp_path / "ours"), tensors, {"word": "call"})
    package.save_file(tensors, tmp_path / "theirs", {"word": "call"})
    for found in (package.load_file(tmp_path / "ours"), read(str(tmp_path / "theirs"), must), read(str(tmp_path / "ours"), must)):
        assert found.keys() == tensors.keys()
        assert all(torch.equal(found[name], x) and found[name].dtype == x.dtype for name, x in tensors.items())


def parts_of(data: bytes) -> tuple[dict[str, Any], bytes]:
    end = 8 + int.from_bytes(data[:8], "little")
    return json.loads(data[8:end]), data[end:]


def joined(text: bytes, body: bytes, length: int | None = None) -> bytes:
    return (len(text) if length is None else length).to_bytes(8, "little") + text + body


def hostile(data: bytes, chance: random.Random) -> bytes:
    """A file that is no right answer. Each kind of change comes equally often."""
    header, body = parts_of(data)
    name = chance.choice([*header])
    entry = header[name]
    length = len(data) - 8 - len(body)
    big = chance.choice((2**31, 2**40, 2**62, 2**63, 2**64 - 1))

    def changed(**words: Any) -> bytes:
        return joined(json.dumps({**header, name: {**entry, **words}}).encode(), body)

    def named(word: str) -> bytes:
        return joined(json.dumps({word if key == name else key: value for key, value in header.items()}).encode(), body)

    begin, end = entry["data_offsets"]
    text = json.dumps(header)
    changes: dict[str, Callable[[], bytes]] = {
        "length of the header": lambda: joined(data[8 : 8 + length], body, chance.choice((0, 1, length - 1, length + 1, big))),
        "truncated": lambda: data[: chance.randrange(len(data))],
        "longer": lambda: data + bytes(chance.randrange(1, 99)),
        "offsets": lambda: changed(
            data_offsets=chance.choice(([begin + 1, end + 1], [-1, end - begin - 1], [begin, big], [end, begin - 1]))
        ),
        "kinds of offsets": lambda: changed(
            data_offsets=chance.choice((None, [], [begin], {}, "0", [str(begin), end], [begin + 0.5, end + 0.5]))
        ),
        "shape": lambda: changed(
            shape=chance.choice(([*entry["shape"], 1], [big], [big, big], [0, big, big], [-1], entry["shape"][1:], None, "x", [[]]))
        ),
        "dtype": lambda: changed(
            dtype=chance.choice(
                [word for word in ("F16", "F32", "F64", "I64", "x\n\x1b[31m", 7, None, []) if word != entry["dtype"]]
            )
        ),
        "name": lambda: named(chance.choice(("../../etc/passwd", "/etc/passwd", "", "o" * 9999, "\0", "__class__", "é"))),
        "one more": lambda: joined(json.dumps({**header, "more": {**entry, "shape": [0], "data_offsets": [0, 0]}}).encode(), body),
        "one less": lambda: joined(json.dumps({key: value for key, value in header.items() if key != name}).encode(), body),
        "twice": lambda: joined(f"{text[:-1]}, {json.dumps(name)}: {json.dumps(entry)}}}".encode(), body),
        "no object": lambda: joined(
            chance.choice((b"[]", b"7", b"null", b"", b"\xff\xfe", text.encode()[:-1], b'"' + b"a" * 99)), body
        ),
        "deep": lambda: joined(chance.choice((b"[", b'{"a":')) * chance.choice((999, 99_999)), body),
        "many digits": lambda: joined(text.replace(str(end), "9" * chance.choice((99, 9999)), 1).encode(), body),
        "no numbers": lambda: joined(text.replace(str(end), chance.choice(("NaN", "1e999", "Infinity", "true")), 1).encode(), body),
        "anything": lambda: chance.randbytes(chance.randrange(99)),
        "pickle": lambda: b"\x80\x04cos\nsystem\n(S'touch hacked'\ntR." + data,
    }
    return changes[chance.choice([*changes])]()


@pytest.mark.parametrize("count", [100, pytest.param(1000, marks=pytest.mark.slow)])
def test_hostile_files_break_their_case(some: tuple[Run, pathlib.Path], count: int) -> None:
    run, path = some
    data, chance, texts = path.read_bytes(), random.Random(count), set[str]()
    assert execute(run).verdict is Verdict.HOLDS
    for number in range(count):
        path.write_bytes(hostile(data, chance))
        outcome = execute(run)
        assert outcome.verdict is Verdict.BROKEN, (number, path.read_bytes()[:200])
        finding = outcome.findings[0]
        assert (finding.kind, finding.detail) == (FailureKind.RAISED, "WrongAnswer"), (number, finding)
        assert finding.what.isprintable() and len(finding.what) < 400
        texts.add(finding.what.partition(".safetensors ")[2][:20])
    assert len(texts) >= 10, texts
    path.write_bytes(data)
    assert execute(run).verdict is Verdict.HOLDS


def test_bytes_of_a_header_that_are_changed_change_no_number(some: tuple[Run, pathlib.Path]) -> None:
    path, chance = some[1], random.Random(0)
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    question, _ = example().read(pathlib.Path(str(some[0].adapter).split(":")[1]) / path.name)
    must = {entry["name"]: (example().DTYPES[entry["dtype"]], entry["shape"]) for entry in question["outputs"]}
    right, refused = read(str(path), must), 0
    for _ in range(300):
        place = chance.randrange(8 + length)
        path.write_bytes(data[:place] + chance.randbytes(1) + data[place + 1 :])
        try:
            found = read(str(path), must)
            assert found.keys() == right.keys() and all(torch.equal(found[name], x) for name, x in right.items())
        except WrongFile:
            refused += 1
    assert refused > 200


def no_answers(path: pathlib.Path) -> Iterator[tuple[str, Callable[[], None]]]:
    elsewhere = path.parent.parent / "elsewhere.safetensors"
    elsewhere.write_bytes(path.read_bytes())
    yield "is a link", lambda: path.symlink_to(elsewhere)
    yield "is no ordinary file", lambda: path.mkdir()
    yield "is no ordinary file", lambda: os.mkfifo(path)


def test_only_an_ordinary_file_is_read(some: tuple[Run, pathlib.Path]) -> None:
    run, path = some
    for words, make in [*no_answers(path)]:
        path.unlink()
        make()
        (finding,) = execute(run).findings
        assert words in finding.what
        if path.is_dir() and not path.is_symlink():
            path.rmdir()
            path.touch()


def test_nan_is_judged(some: tuple[Run, pathlib.Path]) -> None:
    run, path = some
    header, body = parts_of(path.read_bytes())
    path.write_bytes(joined(json.dumps(header).encode(), b"\xff" * len(body)))
    assert {finding.port for finding in execute(run).findings} >= {"o"}


MANIFESTS: dict[str, Callable[[dict[str, Any]], Any]] = {
    "is no manifest": lambda good: [],
    "is no manifest of gdn-verify files 1": lambda good: {**good, "format": "gdn-verify files 2"},
    "is no manifest of gdn-verify files": lambda good: {**good, "questions": {"../x": {}}},
    "declares what no adapter can": lambda good: {**good, "domain": {**good["domain"], "dtypes": ["int8"]}},
    "declares what no adapter can: TypeError": lambda good: {**good, "domain": {**good["domain"], "evil": 1}},
    "algorithm must be one of": lambda good: {**good, "declares": {"algorithm": "magic", "run": "os.system"}},
    "has a case that cannot be judged: ValueError: unknown law": lambda good: {
        **good,
        "cases": [{"line": "law=x adapter=a lengths=1"}],
    },
    "is not exported": lambda good: {**good, "cases": [{"line": "law=again adapter=a lengths=1"}]},
    "or the case is too large": lambda good: {
        **good,
        "cases": [{"line": "law=oracle adapter=a lengths=1000000 heads=64 value_heads=64 key_dim=128 value_dim=128"}],
    },
    "cannot be judged: AttributeError": lambda good: {**good, "cases": [{"line": 7}]},
    "unknown profile": lambda good: {**good, "profile": "x"},
    "has no cases": lambda good: {**good, "cases": []},
}


@pytest.mark.parametrize("words", MANIFESTS)
def test_a_wrong_manifest_is_one_line(
    words: str, questions: pathlib.Path, answers: pathlib.Path, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / MANIFEST).write_text(json.dumps(MANIFESTS[words](manifest_of(str(questions)))))
    assert main(["judge", str(tmp_path), str(answers), "--findings", str(tmp_path / "found")]) == USAGE
    err = capsys.readouterr().err.splitlines()
    assert words in err[-1] and len(err) == 1, err


def test_a_manifest_that_is_no_file_is_one_line(tmp_path: pathlib.Path, answers: pathlib.Path) -> None:
    manifest = tmp_path / MANIFEST
    for make in (lambda: manifest.symlink_to("/etc/passwd"), lambda: os.mkfifo(manifest), lambda: manifest.write_text("[" * 10**6)):
        make()
        with pytest.raises(AdapterError, match=r"manifest.json (is a link|is no ordinary file|its JSON is too deep)"):
            manifest_of(str(tmp_path))
        manifest.unlink()


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ("l2norm", "--out must have no colons"),
        ("rule", "unknown operation 'rule'"),
        ("decode", "needs a FilesAdapter"),
        ("gdn/layer", "is none of paths"),
    ],
)
def test_what_cannot_be_exported_is_refused(
    spec: str, words: str, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["export", spec, "--out", str(tmp_path / ("x:y" if spec == "l2norm" else "x"))]) == USAGE
    assert words in capsys.readouterr().err


def test_a_folder_that_cannot_be_written_is_one_line(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("")
    assert main(["export", "l2norm", "--out", str(tmp_path / "file" / "x")]) == USAGE
    assert capsys.readouterr().err == f"gdn-verify: {tmp_path / 'file' / 'x'} cannot be written: Not a directory\n"


def test_without_answers_nothing_is_decided() -> None:
    outcome = execute(Run.parse(f"law=oracle adapter={KERNELS}Elsewhere lengths=1"))
    assert (outcome.verdict, "gdn-verify judge reads the answers" in outcome.reason) == (Verdict.UNKNOWN, True)
    assert issubclass(Writer, FilesAdapter)
