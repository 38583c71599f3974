"""The verb `new-process`: write a kernel in another language that gdn-verify can ask, and the adapter for it."""

import dataclasses
import os
import pathlib
import sys

from verify.cli import terminal
from verify.cli.exits import HOLDS
from verify.cli.verb_options import NewProcessOptions

TEMPLATES = pathlib.Path(__file__).parent / "templates"
ADAPTER = "my_kernel.py"


@dataclasses.dataclass(frozen=True)
class Template:
    """A kernel's file and the template that it is made of, the command that compiles it, and what its adapter declares."""

    file: str
    source: str
    command: str
    compile: str = ""
    more: str = ""
    sizes: str = ""


OF_LANGUAGES = {
    "cpp": Template("kernel.cpp", "kernel.cpp", '["./kernel"]', "g++ -O2 -std=c++17 kernel.cpp -o kernel"),
    "rust": Template("kernel.rs", "kernel.rs", '["./kernel"]', "rustc -O --edition 2021 kernel.rs -o kernel"),
    "js": Template("kernel.mjs", "kernel.mjs", '["node", "kernel.mjs"]'),
    "py": Template(
        "kernel.py",
        "kernel.py.txt",
        '["python3", "kernel.py"]',
        more='    cost = "slow"  # plain loops of Python: a check then has no long cases\n',
        sizes=", key_dims=(1, 16), value_dims=(1, 16)",
    ),
}


def write(options: NewProcessOptions) -> int:
    """Write the two files, and print what to do next. Returns the exit code. ValueError if one of them is there already."""
    template, folder = OF_LANGUAGES[options.language], pathlib.Path(options.to)
    files = {
        template.file: (TEMPLATES / template.source).read_text(encoding="utf-8"),
        ADAPTER: (TEMPLATES / "adapter.py.txt")
        .read_text(encoding="utf-8")
        .format(file=template.file, command=template.command, more=template.more, sizes=template.sizes),
    }
    for name in files:
        if os.path.lexists(folder / name):
            raise ValueError(f"{folder / name} exists, and new-process replaces no file: name another folder with --to")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in files.items():
            with open(folder / name, "x", encoding="utf-8") as file:
                file.write(text)
    except OSError as error:
        raise ValueError(f"{folder} cannot be written: {error.strerror}") from None
    inside = "" if folder == pathlib.Path(".") else f"cd {folder} && "
    lines = [f"written  {' and '.join(str(folder / name) for name in files)}"]
    lines += [f"compile  {inside}{template.compile}"] if template.compile else []
    lines.append(f"check    gdn-verify check {folder / ADAPTER}:MyKernel")
    terminal.write("\n".join(lines), sys.stdout)  # whole lines, which are copied
    return HOLDS
