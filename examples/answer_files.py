"""Answers the files of `gdn-verify export gated_delta_rule --out questions` with torch alone.

    python answer_files.py questions answers
    gdn-verify judge questions answers

Put your kernel in place of `rule`. In another language, this file is the pattern: one question is one file.
"""

import itertools
import json
import pathlib
import sys

import torch
from torch import Tensor

DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "I32": torch.int32, "I64": torch.int64}


def rule(x: dict[str, Tensor], options: dict[str, str]) -> dict[str, Tensor]:
    """The gated delta rule, one token at a time, in float32."""
    q, k, v, beta = (x[name].float() for name in ("q", "k", "v", "beta"))
    if options["qk_norm"] == "1":
        q, k = (normed(y, float(options["qk_norm_eps"]), options["qk_norm_form"]) for y in (q, k))
    groups, width = v.shape[2] // q.shape[2], q.shape[3]
    q, k = q.repeat_interleave(groups, 2), k.repeat_interleave(groups, 2)
    decay, scale = x["g"].float().exp(), float(options.get("scale", width**-0.5))
    rows = [list(range(len(v)))]  # the sequences that are computed together: a batch, or one of a pack after another
    spans = [(0, v.shape[1])]
    if "cu_seqlens" in x:
        ends = x["cu_seqlens"].tolist()
        spans, rows = [*itertools.pairwise(ends)], [[place] for place in range(len(ends) - 1)]
    outputs, states = [], []
    for (begin, end), numbers in zip(spans, rows, strict=True):
        state = x["state"][numbers].float() if "state" in x else v.new_zeros(len(v), v.shape[2], width, v.shape[3])
        for t in range(begin, end):
            state = state * decay[:, t, :, None, None]
            recalled = torch.einsum("bhk,bhkv->bhv", k[:, t], state)
            state = state + torch.einsum("bhk,bhv->bhkv", k[:, t], beta[:, t, :, None] * (v[:, t] - recalled))
            outputs.append(scale * torch.einsum("bhk,bhkv->bhv", q[:, t], state))
        states.append(state)
    return {"o": torch.stack(outputs, 1) if outputs else 0 * v, "final_state": torch.cat(states)}


def normed(y: Tensor, eps: float, form: str) -> Tensor:
    """The L2 norm over the last axis."""
    squares = y.square().sum(-1, keepdim=True)
    return y / (squares + eps).sqrt() if form == "inside" else y / squares.sqrt().clamp(min=eps)


def answer(question: dict, x: dict[str, Tensor]) -> dict[str, Tensor]:
    """The outputs of a question, or the gradients: each in the dtype that is asked for."""
    inputs = [entry["name"] for entry in question["inputs"]]
    if question["word"] == "call":
        found = rule(x, question["options"])
    else:
        asked = [entry["name"] for entry in question["outputs"]]
        leaves = {"dh0" if name == "state" else f"d{name}": name for name in inputs}
        for name in asked:
            x[leaves[name]].requires_grad_()
        outputs = {name: y for name, y in rule(x, question["options"]).items() if f"d{name}" in x and y.requires_grad}
        cotangents = [x[f"d{name}"].to(y.dtype) for name, y in outputs.items()]
        wanted = [x[leaves[name]] for name in asked]
        gradients = torch.autograd.grad([*outputs.values()], wanted, cotangents, allow_unused=True, materialize_grads=True)
        found = dict(zip(asked, gradients, strict=True))
    return {entry["name"]: found[entry["name"]].detach().to(DTYPES[entry["dtype"]]) for entry in question["outputs"]}


def read(path: pathlib.Path) -> tuple[dict, dict[str, Tensor]]:
    """A question and its tensors."""
    data = bytearray(path.read_bytes())
    start = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:start])
    question = json.loads(header.pop("__metadata__")["question"])
    tensors = {}
    for name, entry in header.items():
        begin, end = (start + place for place in entry["data_offsets"])
        tensors[name] = torch.frombuffer(data[begin:end], dtype=DTYPES[entry["dtype"]]) if begin < end else torch.empty(0)
        tensors[name] = tensors[name].to(DTYPES[entry["dtype"]]).reshape(entry["shape"])
    return question, tensors


def write(path: pathlib.Path, tensors: dict[str, Tensor]) -> None:
    """Write an answer. The numbers of a tensor lie one after the other, the last axis fastest."""
    words, parts, end = {dtype: word for word, dtype in DTYPES.items()}, [], 0
    header = {}
    for name, y in tensors.items():
        parts.append(bytearray(y.numel() * y.element_size()))
        if y.numel():
            torch.frombuffer(parts[-1], dtype=y.dtype).copy_(y.flatten())
        header[name] = {"dtype": words[y.dtype], "shape": [*y.shape], "data_offsets": [end, end + len(parts[-1])]}
        end += len(parts[-1])
    text = json.dumps(header).encode()
    path.write_bytes(b"".join([len(text).to_bytes(8, "little"), text, *parts]))


def main(questions: pathlib.Path, answers: pathlib.Path) -> None:
    """Answer every file of a folder with one in another folder."""
    answers.mkdir(exist_ok=True)
    for path in sorted(questions.glob("*.safetensors")):
        write(answers / path.name, answer(*read(path)))


if __name__ == "__main__":
    main(*map(pathlib.Path, sys.argv[1:]))
