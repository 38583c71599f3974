// Answers the files of `gdn-verify export gated_delta_rule --out questions` in JavaScript: in Node or, without the last part, in a
// browser. Put your kernel, in WebAssembly or WebGPU, in place of `rule`.
//
//     node examples/answer_files.mjs questions answers
//     gdn-verify judge questions answers

const WIDTHS = { F32: 4, BF16: 2, F16: 2, I32: 4, I64: 8 };

// x / sqrt(sum(x^2) + eps), or x / max(sqrt(sum(x^2)), eps), if the call wants normalised queries and keys
function row(x, at, size, options) {
  const values = x.slice(at * size, (at + 1) * size);
  if (options.qk_norm !== "1") return values;
  const eps = Number(options.qk_norm_eps);
  const squares = values.reduce((sum, value) => sum + value * value, 0);
  const root = options.qk_norm_form === "inside" ? Math.sqrt(squares + eps) : Math.max(Math.sqrt(squares), eps);
  return values.map((value) => value / root);
}

// The gated delta rule, token by token. `x` has Float32Arrays by name, `shapes` their shapes. It may wait for a GPU.
async function rule(x, shapes, options) {
  const [B, T, H, K] = shapes.q;
  const [HV, V] = shapes.v.slice(2);
  const scale = Number(options.scale ?? 1 / Math.sqrt(K));
  const offsets = x.cu_seqlens ?? Array.from({ length: B + 1 }, (_, n) => n * T);
  const o = new Float32Array(B * T * HV * V);
  const final_state = new Float32Array((offsets.length - 1) * HV * K * V);
  if (x.state) final_state.set(x.state);
  for (let n = 0; n + 1 < offsets.length; n++) {
    for (let h = 0; h < HV; h++) {
      const S = final_state.subarray((n * HV + h) * K * V, (n * HV + h + 1) * K * V);
      for (let t = offsets[n]; t < offsets[n + 1]; t++) { // a token of all sequences, one after the other
        const place = t * H + Math.floor(h / (HV / H));
        const [q, k] = [row(x.q, place, K, options), row(x.k, place, K, options)];
        const decay = Math.exp(x.g[t * HV + h]);
        for (let i = 0; i < K * V; i++) S[i] *= decay;
        for (let j = 0; j < V; j++) {
          let recalled = 0;
          let read = 0;
          for (let i = 0; i < K; i++) recalled += S[i * V + j] * k[i];
          const change = x.beta[t * HV + h] * (x.v[(t * HV + h) * V + j] - recalled);
          for (let i = 0; i < K; i++) S[i * V + j] += k[i] * change;
          for (let i = 0; i < K; i++) read += S[i * V + j] * q[i];
          o[(t * HV + h) * V + j] = scale * read;
        }
      }
    }
  }
  return { o, final_state };
}

// The bytes of a tensor as numbers of float32. Offsets too are far below 2^24.
function decode(bytes, dtype) {
  const view = new DataView(bytes.buffer, bytes.byteOffset, bytes.byteLength);
  const values = new Float32Array(bytes.byteLength / WIDTHS[dtype]);
  const words = new Uint32Array(values.buffer);
  for (let i = 0; i < values.length; i++) {
    if (dtype === "BF16") words[i] = view.getUint16(2 * i, true) << 16;
    else if (dtype === "F16") values[i] = half(view.getUint16(2 * i, true));
    else if (dtype === "I32") values[i] = view.getInt32(4 * i, true);
    else if (dtype === "I64") values[i] = Number(view.getBigInt64(8 * i, true));
    else values[i] = view.getFloat32(4 * i, true);
  }
  return values;
}

function half(word) {
  const [sign, exponent, fraction] = [word & 0x8000 ? -1 : 1, (word >> 10) & 31, word & 1023];
  if (exponent === 31) return fraction ? NaN : sign * Infinity;
  return sign * (exponent ? 2 ** (exponent - 15) * (1 + fraction / 1024) : 2 ** -24 * fraction);
}

// Numbers as bytes, rounded to the nearest, and to even where two are as near
function encode(values, dtype) {
  const bytes = new Uint8Array(values.length * WIDTHS[dtype]);
  const view = new DataView(bytes.buffer);
  const words = new Uint32Array(Float32Array.from(values).buffer);
  for (let i = 0; i < values.length; i++) {
    if (dtype === "BF16") {
      const nearest = Math.floor((words[i] + 0x7fff + ((words[i] >>> 16) & 1)) / 65536);
      view.setUint16(2 * i, Number.isNaN(values[i]) ? 0x7fc0 : nearest, true);
    } else if (dtype === "F16") view.setUint16(2 * i, toHalf(values[i]), true);
    else view.setFloat32(4 * i, values[i], true);
  }
  return bytes;
}

function toHalf(value) {
  if (Number.isNaN(value)) return 0x7e00;
  const [sign, size] = [value < 0 || Object.is(value, -0) ? 0x8000 : 0, Math.abs(value)];
  if (size >= 65520) return sign | 0x7c00;
  const step = 2 ** (Math.max(Math.floor(Math.log2(size || 1e-9)), -14) - 10); // between two numbers of float16 near this one
  const steps = size / step;
  const down = Math.floor(steps);
  const count = down + (steps - down > 0.5 || (steps - down === 0.5 && down % 2) ? 1 : 0);
  return sign | ((Math.log2(step) + 24) * 1024 + count); // a carry out of the fraction goes into the exponent
}

// The bytes of an answer to the bytes of a question, or null if this kernel cannot answer it: it has no backward.
export async function answer(question) {
  const length = Number(new DataView(question.buffer, question.byteOffset).getBigUint64(0, true));
  const header = JSON.parse(new TextDecoder().decode(question.subarray(8, 8 + length)));
  const { word, options, outputs } = JSON.parse(header.__metadata__.question);
  if (word !== "call") return null;
  delete header.__metadata__;
  const [x, shapes] = [{}, {}];
  for (const [name, { dtype, shape, data_offsets: [begin, end] }] of Object.entries(header)) {
    x[name] = decode(question.slice(8 + length + begin, 8 + length + end), dtype);
    shapes[name] = shape;
  }
  const found = await rule(x, shapes, options);
  const parts = outputs.map(({ name, dtype }) => encode(found[name], dtype));
  let end = 0;
  const entries = outputs.map(({ name, dtype, shape }, i) => {
    const begin = end;
    end += parts[i].length;
    return [name, { dtype, shape, data_offsets: [begin, end] }];
  });
  const text = new TextEncoder().encode(JSON.stringify(Object.fromEntries(entries)));
  const first = new Uint8Array(8);
  new DataView(first.buffer).setBigUint64(0, BigInt(text.length), true);
  return new Uint8Array(await new Blob([first, text, ...parts]).arrayBuffer());
}

// ----------------------------------------------------------------------------------------------------------------- in Node alone

if (globalThis.process?.argv[3]) {
  const { mkdirSync, readFileSync, readdirSync, writeFileSync } = await import("node:fs");
  const [questions, answers] = process.argv.slice(2);
  mkdirSync(answers, { recursive: true });
  for (const name of readdirSync(questions).filter((name) => name.endsWith(".safetensors"))) {
    const bytes = await answer(new Uint8Array(readFileSync(`${questions}/${name}`)));
    if (bytes) writeFileSync(`${answers}/${name}`, bytes);
  }
}
