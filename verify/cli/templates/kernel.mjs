// A kernel that gdn-verify asks over pipes: the gated delta rule, token by token. Put your kernel in place of `compute`.
//
//     gdn-verify check my_kernel.py:MyKernel

import { readSync, writeSync } from "node:fs";

console.log = console.error; // answers go to stdout, and what anybody prints goes to stderr, which reports show

class Refused extends Error {}

// ------------------------------------------------------------------------------------------------ the kernel

// x / sqrt(sum(x^2) + eps) if the call wants normalised queries and keys, else x
function row(x, at, size, norm, eps) {
  const values = x.values.slice(at * size, (at + 1) * size);
  const root = norm ? Math.sqrt(values.reduce((sum, value) => sum + value * value, eps)) : 1;
  return values.map((value) => value / root);
}

// `inputs` and `outputs` have tensors by name: name, dtype, shape, values. An answer must have all outputs.
function compute(word, inputs, outputs, options) {
  if (word !== "call") throw new Refused("this kernel has no backward");
  const { q, k, v, g, beta, state, cu_seqlens } = inputs; // no state, and no offsets in a batch, if the call has none
  const [B, T, H, K] = q.shape;
  const [HV, V] = v.shape.slice(2);
  const norm = options.qk_norm === "1";
  const eps = Number(options.qk_norm_eps ?? 1e-6);
  const scale = Number(options.scale ?? 1 / Math.sqrt(K));
  const offsets = cu_seqlens?.values ?? Array.from({ length: B + 1 }, (_, n) => n * T);
  for (let n = 0; n + 1 < offsets.length; n++) {
    for (let h = 0; h < HV; h++) {
      const at = (n * HV + h) * K * V;
      const S = state ? state.values.slice(at, at + K * V) : new Float32Array(K * V);
      for (let t = offsets[n]; t < offsets[n + 1]; t++) { // a token of all sequences, one after the other
        const place = t * H + Math.floor(h / (HV / H));
        const qt = row(q, place, K, norm, eps);
        const kt = row(k, place, K, norm, eps);
        const decay = Math.exp(g.values[t * HV + h]);
        for (let i = 0; i < K * V; i++) S[i] *= decay;
        for (let j = 0; j < V; j++) {
          let recalled = 0;
          let read = 0;
          for (let i = 0; i < K; i++) recalled += S[i * V + j] * kt[i];
          const change = beta.values[t * HV + h] * (v.values[(t * HV + h) * V + j] - recalled);
          for (let i = 0; i < K; i++) S[i * V + j] += kt[i] * change;
          for (let i = 0; i < K; i++) read += S[i * V + j] * qt[i];
          outputs.o.values[(t * HV + h) * V + j] = scale * read;
        }
      }
      outputs.final_state?.values.set(S, at); // no final state if nobody needs it
    }
  }
}

// ------------------------------------------------------------------------------------------------ the protocol

const WIDTHS = { fp32: 4, bf16: 2, fp16: 2, fp64: 8, int32: 4, int64: 8 };

function read(count) {
  const bytes = Buffer.alloc(count);
  for (let at = 0; at < count; ) {
    const got = readSync(0, bytes, at, count - at, null);
    if (got === 0) process.exit(0);
    at += got;
  }
  return bytes;
}

function readLine() {
  const characters = [];
  for (let byte = read(1)[0]; byte !== 10; byte = read(1)[0]) characters.push(byte);
  return Buffer.from(characters).toString();
}

function write(bytes) {
  for (let at = 0; at < bytes.length; ) at += writeSync(1, bytes, at);
}

function decode(bytes, dtype) {
  if (dtype === "fp16" || dtype === "fp64") throw new Refused(`no dtype ${dtype}`);
  const view = new DataView(bytes.buffer, bytes.byteOffset, bytes.length);
  const values = new Float32Array(bytes.length / WIDTHS[dtype]); // offsets too: they are far below 2^24
  const words = new Uint32Array(values.buffer);
  for (let i = 0; i < values.length; i++) {
    if (dtype === "bf16") words[i] = view.getUint16(2 * i, true) << 16;
    else if (dtype === "int32") values[i] = view.getInt32(4 * i, true);
    else if (dtype === "int64") values[i] = Number(view.getBigInt64(8 * i, true));
    else words[i] = view.getUint32(4 * i, true);
  }
  return values;
}

function encode(values, dtype) {
  const bytes = Buffer.alloc(values.length * WIDTHS[dtype]);
  const words = new Uint32Array(values.buffer);
  values.forEach((value, i) => {
    const half = Math.floor((words[i] + 0x7fff + ((words[i] >>> 16) & 1)) / 65536); // to nearest even
    if (dtype !== "bf16") bytes.writeUInt32LE(words[i], 4 * i);
    else bytes.writeUInt16LE(Number.isNaN(value) ? 0x7fc0 : half, 2 * i);
  });
  return bytes;
}

// `name dtype rank sizes...`, again and again
function tensors(text) {
  const found = {};
  const words = text.split(" ").filter((word) => word);
  while (words.length) {
    const [name, dtype, rank] = words.splice(0, 3);
    const shape = words.splice(0, Number(rank)).map(Number);
    found[name] = { name, dtype, shape, values: null };
  }
  return found;
}

for (;;) {
  const line = readLine();
  const word = line.split(" ")[0];
  if (word === "hello") {
    write(Buffer.from("ok 0\n"));
    continue;
  }
  const [first, second, third] = line.slice(word.length).split(";");
  const inputs = tensors(first);
  const outputs = tensors(second);
  const options = Object.fromEntries(third.split(" ").filter((text) => text).map((text) => text.split("=")));
  const size = (tensor) => tensor.shape.reduce((product, size) => product * size, 1);
  const bytes = Object.values(inputs).map((tensor) => read(size(tensor) * WIDTHS[tensor.dtype])); // read the question to its end
  try {
    Object.values(inputs).forEach((tensor, i) => (tensor.values = decode(bytes[i], tensor.dtype)));
    Object.values(outputs).forEach((tensor) => (tensor.values = new Float32Array(size(tensor))));
    await compute(word, inputs, outputs, options); // which may be async
    const body = Buffer.concat(Object.values(outputs).map((tensor) => encode(tensor.values, tensor.dtype)));
    write(Buffer.concat([Buffer.from(`ok ${body.length}\n`), body]));
  } catch (error) {
    write(Buffer.from(`${error instanceof Refused ? "refuse" : "error"} ${error.message.split("\n")[0]}\n`));
  }
}
