"""Certificates: what is written is verified without torch, and whatever is changed afterwards is named."""

import json
import os
import pathlib
import shutil
import subprocess
import sys
import time
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.answering import Answering
from tests.together import for_each
from verify import __version__
from verify.cli import check_command, exits
from verify.cli.main import main
from verify.engine import explaining
from verify.findings.records import certificate as records
from verify.findings.records import signature
from verify.gpu import record as own
from verify.process import worker
from verify.process.reach import Reach

ROOT = pathlib.Path(__file__).resolve().parents[2]
NEEDS_SSH = pytest.mark.skipif(shutil.which(signature.PROGRAM) is None, reason="ssh-keygen is not installed (openssh-client)")
CHECK = ("check", "kernels/mine.py:Mine", "--device", "cpu", "--profile", "few", "--law", "pure", "--law", "recall")
FILE = ("--certificate", "c.json")


@pytest.fixture(autouse=True)
def folder(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> pathlib.Path:
    """A project with a kernel that nothing of is run: the worker only says how large errors are."""
    (tmp_path / "kernels").mkdir()
    for name in ("mine.py", "helper.py"):
        (tmp_path / "kernels" / name).write_text("number = 1\n")
        os.utime(tmp_path / "kernels" / name, (0, 0))
    sources = own.sources()
    monkeypatch.setattr(own, "sources", lambda: sources)
    monkeypatch.setattr(explaining, "SHRINK_RUNS", 0)
    monkeypatch.setattr(check_command, "workers_of", lambda *_: [Answering()])
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def key(folder: pathlib.Path) -> str:
    """A key, with its public half among the allowed signers of `allowed`; `others` has another one."""
    for name in ("key", "other"):
        subprocess.run(
            ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", name, "-f", str(folder / name)], check=True, timeout=60
        )
    (folder / "allowed").write_text(f"me@example.com {(folder / 'key.pub').read_text()}")
    (folder / "others").write_text(f"them@example.com {(folder / 'other.pub').read_text()}")
    return "key"


def verified(capfd: pytest.CaptureFixture[str], *words: str, place: str = "c.json") -> tuple[int, list[str]]:
    """The exit code of the verb, and its lines."""
    capfd.readouterr()
    code = main(["certificate", place, *words])
    out, err = capfd.readouterr()
    return code, [*out.splitlines(), *err.splitlines()]


def labelled(lines: list[str], label: str) -> list[str]:
    return [line.removeprefix(label).strip() for line in lines if line.startswith(label)]


def content(place: str = "c.json") -> Any:
    return json.loads(pathlib.Path(place).read_text())


def rewrite(change: Any) -> None:
    """Change what a certificate says, and its digest with it: so one forges."""
    data = content()["certificate"]
    change(data)
    pathlib.Path("c.json").write_text(records.text_of(data, ""))


# What is in it


def test_a_certificate_says_what_was_checked_and_found() -> None:
    assert main([*CHECK, *FILE, "--seed", "7"]) == exits.HOLDS
    said = content()["certificate"]
    (check,) = said["checks"]
    assert (said["gdn_verify"], said["own_sha256"]) == (__version__, own.sources())
    assert {*said["versions"]} == {"python", "torch", "triton"}
    assert (check["adapter"], check["kernel"], check["verdict"], check["seed"]) == (CHECK[1], "kernels/mine.py", "holds", 7)
    assert check["sources"] == {"kernels/mine.py": records.sha256(pathlib.Path("kernels/mine.py"))}
    assert {*check["laws"]} == {"pure", "recall"}
    assert check["laws"]["recall"]["ratios"] == {"o": 0.5, "dg": 0.25}
    assert [part["law"] for part in check["sample"]].count("pure") == 2
    assert {part["ratio"] for part in check["sample"]} == {0.5}


def test_the_sample_of_a_law_is_its_first_and_last_line(monkeypatch: pytest.MonkeyPatch) -> None:
    asking = Answering()
    monkeypatch.setattr(check_command, "workers_of", lambda *_: [asking])
    main([*CHECK[:-2], *FILE])
    sample = [part["run"] for part in content()["certificate"]["checks"][0]["sample"]]
    assert sample == [asking.asked[0], asking.asked[-1]]


def test_files_around_the_kernels_have_names_from_where_python_finds_them(
    folder: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    library = folder / "site" / "package"
    library.mkdir(parents=True)
    for name in ("__init__.py", "ops.py", "more.py"):
        (library / name).write_text(f"# {name}\n")
    monkeypatch.syspath_prepend(folder / "site")
    lines = {str(library / "more.py"): {1}, str(folder / "kernels" / "helper.py"): {1}}
    functions = {"package.ops:f": {}, "torch.nn:g": {}, "nowhere.ops:h": {}, "mine:k": {}}
    files = records._Files("kernels/mine.py:Mine", float("inf"))
    reach = Reach(functions=functions, lines=lines)  # type: ignore[arg-type]
    files.add_modules(name for name in reach.functions if not name.startswith("torch"))
    for file in reach.lines:
        files.add(pathlib.Path(file))
    assert {*files.digests} == {"package/ops.py", "package/more.py", "kernels/helper.py", "kernels/mine.py"}
    assert files.missing == ["nowhere.ops:h"]
    assert "package" not in sys.modules, "nothing is imported"


def test_a_kernel_that_changes_while_the_check_runs_gets_no_certificate(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    later = time.time() + 60
    os.utime("kernels/mine.py", (later, later))
    assert main([*CHECK, *FILE]) == exits.UNDECIDED
    assert "mine.py has changed while the check ran" in capfd.readouterr().err
    assert not pathlib.Path("c.json").exists()


@for_each(
    ("words", "line"),
    [
        (("--sign-key", "key"), "--sign-key is for --certificate"),
        ((*FILE, "--shard", "1/2"), "--certificate is for a whole check"),
        ((*FILE, "--tune", "sweep"), "--certificate is for a whole check"),
        ((*FILE, "--sign-key", "nowhere"), "--sign-key must name an SSH key, got 'nowhere'"),
        ((*FILE, "--sign-key", "kernels/mine.py"), "--sign-key: ssh-keygen"),
        (("--certificate", "nowhere/c.json"), "--certificate must name a file that can be written"),
    ],
)
def test_a_certificate_that_cannot_be_made_is_refused_before_any_work(
    words: tuple[str, ...], line: str, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(check_command, "workers_of", lambda *_: pytest.fail("work has begun"))
    assert main([*CHECK, *words]) == exits.USAGE
    assert line in capfd.readouterr().err
    assert not pathlib.Path("c.json").exists()


# Verifying


def test_a_right_certificate_without_a_signature_says_so(capfd: pytest.CaptureFixture[str]) -> None:
    main([*CHECK, *FILE])
    code, lines = verified(capfd)
    assert code == exits.HOLDS
    assert lines[1] == "  holds        pure, recall"
    assert labelled(lines, "as certified") == [
        "1 source is as certified for kernels/mine.py:Mine",
        f"gdn-verify {__version__} is as it was",
        "there is no signature, so that anybody can have written this",
    ]
    assert lines[-1] == "the certificate is right"


@NEEDS_SSH
def test_a_signature_is_by_an_allowed_signer_or_not(key: str, capfd: pytest.CaptureFixture[str]) -> None:
    assert main([*CHECK, *FILE, "--sign-key", key]) == exits.HOLDS
    code, lines = verified(capfd)
    assert (code, "the signer is not known" in lines[-2]) == (exits.HOLDS, True)
    code, lines = verified(capfd, "--allowed-signers", "allowed")
    assert (code, 'the signature is right: Good "gdn-verify" signature for me@example.com' in lines[-2]) == (exits.HOLDS, True)
    code, lines = verified(capfd, "--allowed-signers", "others")
    assert (code, "the signature is not by an allowed signer" in lines[-2]) == (exits.BROKEN, True)
    rewrite(lambda data: None)
    code, lines = verified(capfd, "--allowed-signers", "allowed")
    assert labelled(lines, "DIFFERS") == ["there is no signature, so that anybody can have written this"]
    assert verified(capfd, "--allowed-signers", "nowhere")[0] == exits.USAGE


@NEEDS_SSH
def test_a_changed_kernel_record_or_signature_is_named(key: str, capfd: pytest.CaptureFixture[str]) -> None:
    main([*CHECK, *FILE, "--sign-key", key])
    text, kernel = pathlib.Path("c.json").read_text(), pathlib.Path("kernels/mine.py")
    kernel.write_text("number = 2\n")
    code, lines = verified(capfd)
    (line,) = labelled(lines, "DIFFERS")
    assert (code, line.startswith("the kernel kernels/mine.py has changed: sha256 ")) == (exits.BROKEN, True)
    kernel.write_text("number = 1\n")
    assert verified(capfd)[0] == exits.HOLDS
    pathlib.Path("c.json").write_text(text.replace('"seed": 0', '"seed": 1'))
    code, lines = verified(capfd)
    record, signed = labelled(lines, "DIFFERS")
    assert (code, record.startswith("the record has changed: "), signed.startswith("the signature is wrong: ")) == (1, True, True)
    data = json.loads(text)
    data["certificate"]["checks"][0]["seed"] = 1
    data["sha256"] = records.digest(data["certificate"])
    pathlib.Path("c.json").write_text(json.dumps(data))
    (line,) = labelled(verified(capfd)[1], "DIFFERS")
    assert line.startswith("the signature is wrong: ")
    pathlib.Path("c.json").write_text(text.replace("SIGNATURE-----\\nU1NI", "SIGNATURE-----\\nU1NJ"))
    (line,) = labelled(verified(capfd)[1], "DIFFERS")
    assert line.startswith("the signature is wrong: ")


@NEEDS_SSH
def test_no_byte_can_be_changed_unseen(key: str, capfd: pytest.CaptureFixture[str]) -> None:
    """Every byte counts: of the kernel; of the file, unless it still says the same."""
    main([*CHECK, *FILE, "--sign-key", key])
    right = pathlib.Path("c.json").read_bytes()
    parts = {
        "record": (0, right.index(b'"sha256": "', right.rindex(b'"versions"'))),
        "digest": (right.index(b'"sha256": "', right.rindex(b'"versions"')), right.index(b'"signature": ')),
        "signature": (right.index(b'"signature": '), len(right)),
    }
    seen = set[int]()

    @settings(max_examples=100, suppress_health_check=[HealthCheck.function_scoped_fixture])
    @given(part=st.sampled_from(sorted(parts)), where=st.floats(0, 1, exclude_max=True), bits=st.integers(1, 255))
    def flip(part: str, where: float, bits: int) -> None:
        first, end = parts[part]
        place = first + int(where * (end - first))
        data = bytearray(right)
        data[place] ^= bits
        pathlib.Path("c.json").write_bytes(data)
        code, lines = verified(capfd)
        seen.add(code)
        if code == exits.HOLDS:
            assert same(bytes(data), right), (place, bits)
        else:
            assert labelled(lines, "DIFFERS") or lines[-1].startswith("gdn-verify: c.json is no certificate: "), lines

    def same(one: bytes, other: bytes) -> bool:
        """Whether two files say the same: the same JSON, and the same bytes in the signature's base64."""
        parsed = [json.loads(text) for text in (one, other)]
        for data in parsed:
            data["signature"] = "".join(data["signature"].split())
        return bool(parsed[0] == parsed[1])

    flip()
    assert {exits.BROKEN, exits.USAGE} <= seen
    pathlib.Path("c.json").write_bytes(right)
    kernel = pathlib.Path("kernels/mine.py")
    text = kernel.read_bytes()
    for place in range(len(text)):
        kernel.write_bytes(text[:place] + bytes([text[place] ^ 1]) + text[place + 1 :])
        assert verified(capfd)[0] == exits.BROKEN


def test_what_cannot_be_compared_is_told(
    folder: pathlib.Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    main([*CHECK, *FILE])
    (folder / "elsewhere").mkdir()
    (folder / "kernels").rename(folder / "elsewhere" / "kernels")
    code, lines = verified(capfd)
    assert (code, labelled(lines, "NOT COMPARED")) == (
        exits.UNDECIDED,
        ["the kernel kernels/mine.py is not at hand: --path names the folder in which it is"],
    )
    assert verified(capfd, "--path", "elsewhere")[0] == exits.HOLDS
    rewrite(lambda data: data.update(gdn_verify="9.9"))
    assert labelled(verified(capfd, "--path", "elsewhere")[1], "NOT COMPARED")[0].startswith("gdn-verify 9.9 is not at hand")
    rewrite(lambda data: data.update(gdn_verify=__version__, own_sha256="0"))
    code, lines = verified(capfd, "--path", "elsewhere")
    assert labelled(lines, "DIFFERS")[0].startswith("gdn-verify itself has changed")


def test_a_certificate_in_which_nothing_is_to_be_compared_is_not_right(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker, "Worker", lambda **_: pytest.fail("a worker was started"))
    for field, empty, words, told in (
        ("laws", {}, (), "no law of kernels/mine.py:Mine had a case that held"),
        ("sources", {}, (), "no source of kernels/mine.py:Mine is certified"),
        ("sample", [], ("--again",), "no line of kernels/mine.py:Mine is in the certificate, so none was run again"),
    ):
        main([*CHECK, *FILE])
        kernel = {"kernel": ""} if field == "sources" else {}
        rewrite(lambda data, changed={field: empty, **kernel}: data["checks"][0].update(changed))
        code, lines = verified(capfd, *words)
        assert (code, labelled(lines, "NOT COMPARED")) == (exits.UNDECIDED, [told])
    rewrite(lambda data: data.update(checks=[]))
    code, lines = verified(capfd)
    assert (code, lines) == (exits.USAGE, ["gdn-verify: c.json is no certificate: it is about no check"])


@NEEDS_SSH
def test_without_ssh_keygen_a_signature_is_not_compared(
    key: str, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    main([*CHECK, *FILE, "--sign-key", key])
    monkeypatch.setattr(shutil, "which", lambda name: None)
    code, lines = verified(capfd)
    assert (code, labelled(lines, "NOT COMPARED")) == (
        exits.UNDECIDED,
        ["the signature: ssh-keygen is not installed, and signatures need it"],
    )
    assert main([*CHECK, *FILE, "--sign-key", key]) == exits.USAGE


def test_a_check_that_did_not_hold_is_no_right_certificate(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(check_command, "workers_of", lambda *_: [Answering(lambda run: 4.0 if run.law == "pure" else 0.5)])
    assert main([*CHECK, *FILE]) == exits.BROKEN
    code, lines = verified(capfd)
    assert lines[1:3] == ["  holds        recall", "  broken       pure"]
    assert (code, labelled(lines, "DIFFERS")) == (exits.BROKEN, ["kernels/mine.py:Mine was broken when it was checked: pure"])

    def forget(data: Any) -> None:
        data["checks"][0].update(verdict="unknown", exit_code=3, laws={}, not_run=["pure"])

    rewrite(forget)
    code, lines = verified(capfd)
    assert lines[1] == "  not run      pure"
    assert (code, labelled(lines, "NOT COMPARED")) == (
        exits.UNDECIDED,
        ["kernels/mine.py:Mine was undecided when it was checked (exit code 3)"],
    )


# Hostile files


def deep(depth: int) -> bytes:
    return b'{"certificate": ' + b"[" * depth + b"]" * depth + b', "sha256": "", "signature": ""}'


@for_each(
    "data",
    [
        b"",
        b"\xff\xfe{}",
        b"no JSON",
        b"[]",
        b"3",
        b'{"certificate": {}}',
        b'{"certificate": {}, "sha256": "", "signature": "", "more": 1}',
        b'{"certificate": {}, "certificate": {}, "sha256": "", "signature": ""}',
        b'{"certificate": {}, "sha256": 3, "signature": ""}',
        b'{"certificate": NaN, "sha256": "", "signature": ""}',
        b'{"certificate": 1e999, "sha256": "", "signature": ""}',
        b'{"certificate": ' + b"9" * 5000 + b', "sha256": "", "signature": ""}',
        deep(100_000),
        deep(900),
        b" " * (records.MOST_BYTES + 1),
    ],
)
def test_a_file_that_is_no_certificate_is_one_line(data: bytes, capfd: pytest.CaptureFixture[str]) -> None:
    pathlib.Path("c.json").write_bytes(data)
    code, lines = verified(capfd)
    if code == exits.BROKEN:  # it has the form of one, and another digest
        assert labelled(lines, "DIFFERS")[0].startswith("the record has changed: ")
    else:
        assert (code, len(lines)) == (exits.USAGE, 1)
        assert lines[0].startswith("gdn-verify: c.json is no certificate: ")


def test_a_value_that_a_second_one_hides_is_refused(capfd: pytest.CaptureFixture[str]) -> None:
    main([*CHECK, *FILE])
    text = pathlib.Path("c.json").read_text()
    pathlib.Path("c.json").write_text(text.replace('"seed": 0', '"seed": 1, "seed": 0'))
    assert verified(capfd) == (exits.USAGE, ["gdn-verify: c.json is no certificate: a key comes twice in one object"])


@for_each("name", ["/etc/passwd.py", "../mine.py", "a/../../mine.py", "mine.txt", "a\0.py", f"{'a' * 2000}.py"])
def test_nothing_is_read_outside_of_where_python_looks(name: str, folder: pathlib.Path, capfd: pytest.CaptureFixture[str]) -> None:
    (folder / "kernels").mkdir(exist_ok=True)
    (folder / "kernels" / "mine.py").touch()
    assert main([*CHECK, *FILE]) == exits.HOLDS
    rewrite(lambda data: data["checks"][0].update(sources={name: ""}, kernel=""))
    code, lines = verified(capfd)
    assert (code, len(lines)) == (exits.USAGE, 1)
    assert "a source must be a file of a module below a folder, got " in lines[0]


def test_wrong_types_and_what_terminals_obey_are_one_line(capfd: pytest.CaptureFixture[str]) -> None:
    main([*CHECK, *FILE])
    right = content()["certificate"]
    changes: list[dict[str, Any]] = [
        *({"schema": schema} for schema in (2, "1", None)),
        {"checks": 3},
        {"checks": [{}]},
        {"checks": [{**right["checks"][0], "seed": "7"}]},
        {"checks": [{**right["checks"][0], "sources": {}}]},
        {"versions": None},
    ]
    for change in changes:
        rewrite(lambda data, change=change: data.update({**right, **change}))
        code, lines = verified(capfd)
        assert (code, len(lines), lines[0].startswith("gdn-verify: c.json is no certificate: ")) == (exits.USAGE, 1, True), change
    rewrite(lambda data: data.update({**right, "checks": [{**right["checks"][0], "device": "\x1b[2J\ud800\n"}]}))
    code, lines = verified(capfd)
    assert (code, "on '\\x1b[2J\\ud800\\n'" in lines[0]) == (exits.HOLDS, True)
    assert verified(capfd, place="nowhere.json") == (
        exits.USAGE,
        ["gdn-verify: nowhere.json cannot be read: No such file or directory"],
    )


# Running the sample again


class Again(Answering):
    """A worker as a command starts one."""

    def __init__(self, environment: Any = None) -> None:
        super().__init__(lambda run: RATIO["now"])

    def __enter__(self) -> "Again":
        return self

    def __exit__(self, *_: object) -> None:
        pass


RATIO = {"now": 0.5}


def test_the_sample_is_run_again(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    main([*CHECK, *FILE])
    monkeypatch.setattr(worker, "Worker", Again)
    for ratio, code, told in (
        (0.5, exits.HOLDS, "4 lines of kernels/mine.py:Mine were run again, with the same ratios"),
        (0.25, exits.BROKEN, "a line has another ratio: 0.25, certified 0.5: law="),
        (4.0, exits.BROKEN, "a line that held is now broken: law="),
    ):
        monkeypatch.setitem(RATIO, "now", ratio)
        got, lines = verified(capfd, "--again")
        assert (got, any(told in line for line in lines)) == (code, True), lines
    rewrite(lambda data: data["versions"].update(torch="1.0"))
    monkeypatch.setitem(RATIO, "now", 0.25)
    code, lines = verified(capfd, "--again")
    assert (code, any("whose ratios may differ" in line for line in lines)) == (exits.HOLDS, True)


def test_only_what_is_certified_is_run_again(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker, "Worker", lambda **_: pytest.fail("a worker was started"))
    main([*CHECK, *FILE])
    right = content()["certificate"]

    def undecided(**change: Any) -> str:
        rewrite(lambda data: data.update({**right, "checks": [{**right["checks"][0], **change}]}))
        code, lines = verified(capfd, "--again")
        assert code == exits.UNDECIDED
        return labelled(lines, "NOT COMPARED")[-1]

    assert "kernels/helper.py is not the file that is certified" in undecided(adapter="kernels/helper.py:Mine", kernel="")
    assert "need --ranks 2" in undecided(under="--ranks 2")
    assert "about another adapter" in undecided(
        sample=[{"law": "pure", "run": "law=pure adapter=fla/chunk lengths=1", "ratio": 0.5}]
    )
    pathlib.Path("kernels/mine.py").write_text("number = 2\n")
    rewrite(lambda data: data.update(right))
    assert "no line was run again" in labelled(verified(capfd, "--again")[1], "NOT COMPARED")[-1]


@pytest.mark.slow
def test_lines_of_a_real_check_have_the_same_ratios_again(
    folder: pathlib.Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.undo()
    monkeypatch.chdir(folder)
    words = (
        "check",
        f"{ROOT}/tests/right.py:Chunkwise",
        "--law",
        "oracle",
        "--law",
        "cut",
        "--profile",
        "least",
        "--device",
        "cpu",
    )
    assert main([*words, *FILE]) == exits.HOLDS
    code, lines = verified(capfd, "--again")
    assert (code, any(line.endswith("were run again, with the same ratios") for line in lines)) == (exits.HOLDS, True), lines
