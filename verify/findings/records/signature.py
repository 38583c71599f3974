"""Signatures of certificates by SSH keys. ssh-keygen makes and verifies them, so that keys stay where they are."""

import pathlib
import shutil
import subprocess
import tempfile

PROGRAM, NAMESPACE = "ssh-keygen", "gdn-verify"
BEGIN, END = "-----BEGIN SSH SIGNATURE-----", "-----END SSH SIGNATURE-----"
LIMIT_S, MOST = 60.0, 65536


class NoProgram(Exception):
    """ssh-keygen is not installed. The message is one line."""


def sign(data: bytes, key: str) -> str:
    """The signature of data by the key in a file. ValueError, in one line, if the key cannot sign. NoProgram."""
    done = _run(["-Y", "sign", "-q", "-n", NAMESPACE, "-f", key], data)
    text = done.stdout.decode("ascii", "replace")
    if done.returncode or not text.startswith(BEGIN):
        raise ValueError(f"{PROGRAM} cannot sign with {key}: {_last(done)}")
    return text


def verify(data: bytes, signature: str, allowed: str | None) -> tuple[bool, str]:
    """Whether a signature is right and, with a file of allowed signers, by one of them; and that in words. NoProgram.

    Without such a file, any key may have signed.
    """
    text = signature.strip()
    if not (text.startswith(BEGIN) and text.endswith(END) and len(signature) <= MOST and signature.isascii()):
        return False, "the signature is none of SSH"
    with tempfile.TemporaryDirectory() as folder:
        place = pathlib.Path(folder) / "signature"
        place.write_text(signature, encoding="ascii")
        if allowed is None:
            done = _run(["-Y", "check-novalidate", "-n", NAMESPACE, "-s", str(place)], data)
            good = f"the signature is right, but the signer is not known: {_last(done)}"
            return not done.returncode, f"the signature is wrong: {_last(done)}" if done.returncode else good
        found = _run(["-Y", "find-principals", "-s", str(place), "-f", allowed], b"")
        names = found.stdout.decode("utf-8", "replace").split("\n")
        if found.returncode or not names[0]:
            return False, f"the signature is not by an allowed signer: {_last(found)}"
        done = _run(["-Y", "verify", "-n", NAMESPACE, "-s", str(place), "-f", allowed, "-I", names[0]], data)
        return not done.returncode, f"the signature is {'wrong' if done.returncode else 'right'}: {_last(done)}"


def _run(words: list[str], data: bytes) -> "subprocess.CompletedProcess[bytes]":
    program = shutil.which(PROGRAM)
    if program is None:
        raise NoProgram(f"{PROGRAM} is not installed, and signatures need it")
    command = [program, *words]
    try:
        return subprocess.run(command, input=data, capture_output=True, check=False, timeout=LIMIT_S)  # noqa: S603 - no shell
    except subprocess.TimeoutExpired:
        return subprocess.CompletedProcess(command, 1, b"", f"no answer within {LIMIT_S:g} s".encode())


def _last(done: "subprocess.CompletedProcess[bytes]") -> str:
    """The last line that ssh-keygen wrote, without what a terminal obeys."""
    lines = (done.stdout + b"\n" + done.stderr).decode("utf-8", "replace").split("\n")
    words = [line.strip() for line in lines if line.strip()]
    line = words[-1] if words else f"exit code {done.returncode}"
    return line if line.isprintable() else ascii(line)
