// A kernel that gdn-verify asks over pipes: the gated delta rule, token by token. Put your kernel in place of `compute`.
//
//     rustc -O --edition 2021 kernel.rs -o kernel
//     gdn-verify check my_kernel.py:MyKernel
//
// Answers go to stdout: print everything else with eprintln!, which reports show.

use std::collections::HashMap;
use std::io::{BufRead, Read, Write};
use std::str::SplitWhitespace;

struct Tensor {
    name: String,
    dtype: String,
    shape: Vec<usize>,
    values: Vec<f32>, // offsets too: they are far below 2^24
}

struct Call {
    word: String, // "call" or "vjp"
    inputs: HashMap<String, Tensor>,
    outputs: Vec<Tensor>, // those that the answer must have, in this order
    options: HashMap<String, String>,
}

impl Call {
    fn number(&self, name: &str, otherwise: f32) -> f32 {
        self.options.get(name).map_or(otherwise, |text| text.parse().unwrap())
    }
}

// ------------------------------------------------------------------------------------------------ the kernel

// x / sqrt(sum(x^2) + eps) if the call wants normalised queries and keys, else x
fn row(x: &Tensor, at: usize, size: usize, norm: bool, eps: f32) -> Vec<f32> {
    let values = &x.values[at * size..(at + 1) * size];
    let root = if norm { (values.iter().map(|value| value * value).sum::<f32>() + eps).sqrt() } else { 1.0 };
    values.iter().map(|value| value / root).collect()
}

// An error is the text of a refusal: the call is then unsupported.
fn compute(call: &mut Call) -> Result<(), String> {
    if call.word != "call" {
        return Err("this kernel has no backward".to_string());
    }
    let (norm, eps) = (call.number("qk_norm", 0.0) != 0.0, call.number("qk_norm_eps", 1e-6));
    let (q, k, v) = (&call.inputs["q"], &call.inputs["k"], &call.inputs["v"]); // [B, T, H or HV, K or V]
    let (g, beta) = (&call.inputs["g"], &call.inputs["beta"]); // [B, T, HV]
    let (state, offsets) = (call.inputs.get("state"), call.inputs.get("cu_seqlens")); // [N, HV, K, V], [N + 1]
    let (batch, tokens, heads, width) = (q.shape[0], q.shape[1], q.shape[2], q.shape[3]);
    let (value_heads, columns) = (v.shape[2], v.shape[3]);
    let scale = call.number("scale", 1.0 / (width as f32).sqrt());
    let sequences = offsets.map_or(batch, |x| x.values.len() - 1);
    let (mut o, mut finals) = (vec![0f32; v.values.len()], Vec::new());
    for n in 0..sequences {
        let (first, end) = match offsets {
            Some(x) => (x.values[n] as usize, x.values[n + 1] as usize),
            None => (n * tokens, (n + 1) * tokens),
        };
        for h in 0..value_heads {
            let size = width * columns;
            let at = (n * value_heads + h) * size;
            let mut s = state.map_or(vec![0f32; size], |x| x.values[at..at + size].to_vec());
            for t in first..end {
                // a token of all sequences, one after the other
                let place = t * heads + h / (value_heads / heads);
                let (qt, kt) = (row(q, place, width, norm, eps), row(k, place, width, norm, eps));
                let (decay, b) = (g.values[t * value_heads + h].exp(), beta.values[t * value_heads + h]);
                s.iter_mut().for_each(|x| *x *= decay);
                for j in 0..columns {
                    let at = (t * value_heads + h) * columns + j;
                    let recalled: f32 = (0..width).map(|i| s[i * columns + j] * kt[i]).sum();
                    let change = b * (v.values[at] - recalled);
                    (0..width).for_each(|i| s[i * columns + j] += kt[i] * change);
                    o[at] = scale * (0..width).map(|i| s[i * columns + j] * qt[i]).sum::<f32>();
                }
            }
            finals.extend(s);
        }
    }
    for output in &mut call.outputs {
        output.values = if output.name == "o" { std::mem::take(&mut o) } else { std::mem::take(&mut finals) };
    }
    Ok(()) // no final state if nobody needs it: it is not among the outputs then
}

// ------------------------------------------------------------------------------------------------ the protocol

fn width(dtype: &str) -> usize {
    match dtype {
        "bf16" | "fp16" => 2,
        "fp32" | "int32" => 4,
        _ => 8,
    }
}

fn decode(bytes: &[u8], dtype: &str) -> f32 {
    match dtype {
        "bf16" => f32::from_bits((u16::from_le_bytes(bytes.try_into().unwrap()) as u32) << 16),
        "int32" => i32::from_le_bytes(bytes.try_into().unwrap()) as f32,
        "int64" => i64::from_le_bytes(bytes.try_into().unwrap()) as f32,
        _ => f32::from_le_bytes(bytes.try_into().unwrap()),
    }
}

fn encode(value: f32, dtype: &str, to: &mut Vec<u8>) {
    let bits = value.to_bits();
    if dtype == "bf16" {
        let half = if value.is_nan() { 0x7fc0 } else { (bits + 0x7fff + (bits >> 16 & 1)) >> 16 }; // to nearest even
        to.extend((half as u16).to_le_bytes());
    } else {
        to.extend(bits.to_le_bytes());
    }
}

// Words `name dtype rank sizes...` up to the next semicolon
fn tensors(words: &mut SplitWhitespace) -> Vec<Tensor> {
    let mut found = Vec::new();
    while let Some(name) = words.next().filter(|word| *word != ";") {
        let dtype = words.next().unwrap().to_string();
        let rank: usize = words.next().unwrap().parse().unwrap();
        let shape = (0..rank).map(|_| words.next().unwrap().parse().unwrap()).collect();
        found.push(Tensor { name: name.to_string(), dtype, shape, values: Vec::new() });
    }
    found
}

fn main() {
    let (mut questions, mut answers) = (std::io::stdin().lock(), std::io::stdout().lock());
    let mut line = String::new();
    while questions.read_line(&mut line).unwrap() > 0 {
        let mut words = line.split_whitespace();
        let word = words.next().unwrap().to_string();
        let (mut body, mut refusal) = (Vec::new(), None);
        if word != "hello" {
            let mut inputs = HashMap::new();
            for mut tensor in tensors(&mut words) {
                let mut bytes = vec![0u8; tensor.shape.iter().product::<usize>() * width(&tensor.dtype)];
                questions.read_exact(&mut bytes).unwrap(); // to their end, whatever is the matter with the call
                if ["fp16", "fp64"].contains(&tensor.dtype.as_str()) {
                    refusal = Some(format!("no dtype {}", tensor.dtype));
                } else {
                    tensor.values = bytes.chunks(width(&tensor.dtype)).map(|x| decode(x, &tensor.dtype)).collect();
                }
                inputs.insert(tensor.name.clone(), tensor);
            }
            let outputs = tensors(&mut words);
            let pairs = words.filter_map(|word| word.split_once('='));
            let options = pairs.map(|(name, value)| (name.to_string(), value.to_string())).collect();
            let mut call = Call { word, inputs, outputs, options };
            refusal = refusal.or_else(|| compute(&mut call).err());
            for output in &call.outputs {
                output.values.iter().for_each(|value| encode(*value, &output.dtype, &mut body));
            }
        }
        match refusal {
            Some(text) => writeln!(answers, "refuse {text}").unwrap(),
            None => {
                writeln!(answers, "ok {}", body.len()).unwrap();
                answers.write_all(&body).unwrap();
            }
        }
        answers.flush().unwrap();
        line.clear();
    }
}
