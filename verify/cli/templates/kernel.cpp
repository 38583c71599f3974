// A kernel that gdn-verify asks over pipes: the gated delta rule, token by token. Put your kernel in place of `compute`.
//
//     g++ -O2 -std=c++17 kernel.cpp -o kernel
//     gdn-verify check my_kernel.py:MyKernel

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <iostream>
#include <map>
#include <sstream>
#include <stdexcept>
#include <string>
#include <unistd.h>
#include <vector>

struct Refused : std::runtime_error { using runtime_error::runtime_error; };

struct Tensor {
    std::string name, dtype;
    std::vector<int64_t> shape;
    std::vector<char> bytes;
    std::vector<float> values;  // offsets too: they are far below 2^24
};

struct Call {
    std::string word;  // "call" or "vjp"
    std::map<std::string, Tensor> inputs;
    std::vector<Tensor> outputs;  // those that the answer must have, in this order
    std::map<std::string, std::string> options;

    const Tensor* find(const std::string& name) const { return inputs.count(name) ? &inputs.at(name) : nullptr; }
    Tensor* output(const std::string& name) {
        for (Tensor& tensor : outputs) if (tensor.name == name) return &tensor;
        return nullptr;
    }
    float number(const std::string& name, float otherwise) const {
        return options.count(name) ? std::stof(options.at(name)) : otherwise;
    }
};

// ------------------------------------------------------------------------------------------------ the kernel

// x / sqrt(sum(x^2) + eps) if the call wants normalised queries and keys, else x
static std::vector<float> row(const Tensor& x, int64_t at, int64_t size, bool norm, float eps) {
    std::vector<float> result(x.values.begin() + at * size, x.values.begin() + (at + 1) * size);
    float sum = 0;  // eps comes last: small squares that are added to a larger eps one by one all round alike
    for (float value : result) sum += value * value;
    if (norm) for (float& value : result) value /= std::sqrt(sum + eps);
    return result;
}

static void compute(Call& call) {
    if (call.word != "call") throw Refused("this kernel has no backward");
    const Tensor &q = call.inputs.at("q"), &k = call.inputs.at("k"), &v = call.inputs.at("v");  // [B, T, H or HV, K or V]
    const Tensor &g = call.inputs.at("g"), &beta = call.inputs.at("beta");                      // [B, T, HV]
    const Tensor *state = call.find("state"), *offsets = call.find("cu_seqlens");               // [N, HV, K, V], [N + 1]
    const int64_t B = q.shape[0], T = q.shape[1], H = q.shape[2], K = q.shape[3], HV = v.shape[2], V = v.shape[3];
    const bool norm = call.number("qk_norm", 0) != 0;
    const float scale = call.number("scale", 1 / std::sqrt(float(K))), eps = call.number("qk_norm_eps", 1e-6f);
    const int64_t N = offsets ? int64_t(offsets->values.size()) - 1 : B;
    Tensor *o = call.output("o"), *final_state = call.output("final_state");  // no final state if nobody needs it
    for (int64_t n = 0; n < N; n++) for (int64_t h = 0; h < HV; h++) {
        std::vector<float> S(K * V, 0.0f);
        if (state) std::memcpy(S.data(), &state->values[(n * HV + h) * K * V], S.size() * sizeof(float));
        const int64_t first = offsets ? offsets->values[n] : n * T, end = offsets ? offsets->values[n + 1] : (n + 1) * T;
        for (int64_t t = first; t < end; t++) {  // a token of all sequences, one after the other
            const int64_t place = t * H + h / (HV / H);
            const std::vector<float> qt = row(q, place, K, norm, eps), kt = row(k, place, K, norm, eps);
            const float decay = std::exp(g.values[t * HV + h]), b = beta.values[t * HV + h];
            for (float& s : S) s *= decay;
            for (int64_t j = 0; j < V; j++) {
                float recalled = 0, read = 0;
                for (int64_t i = 0; i < K; i++) recalled += S[i * V + j] * kt[i];
                const float change = b * (v.values[(t * HV + h) * V + j] - recalled);
                for (int64_t i = 0; i < K; i++) S[i * V + j] += kt[i] * change;
                for (int64_t i = 0; i < K; i++) read += S[i * V + j] * qt[i];
                o->values[(t * HV + h) * V + j] = scale * read;
            }
        }
        if (final_state && !S.empty()) std::memcpy(&final_state->values[(n * HV + h) * K * V], S.data(), S.size() * sizeof(float));
    }
}

// ------------------------------------------------------------------------------------------------ the protocol

static size_t width(const std::string& dtype) {
    return dtype == "bf16" || dtype == "fp16" ? 2 : dtype == "fp32" || dtype == "int32" ? 4 : 8;
}

static float decode(const char* from, const std::string& dtype) {
    uint32_t bits = 0;
    int64_t whole = 0;
    float value;
    if (dtype == "fp16" || dtype == "fp64") throw Refused("no dtype " + dtype);
    if (dtype == "int64") { std::memcpy(&whole, from, 8); return whole; }
    if (dtype == "int32") { int32_t i; std::memcpy(&i, from, 4); return i; }
    if (dtype == "bf16") { uint16_t half; std::memcpy(&half, from, 2); bits = uint32_t(half) << 16; }
    else std::memcpy(&bits, from, 4);
    std::memcpy(&value, &bits, 4);
    return value;
}

static void encode(float value, const std::string& dtype, std::string& to) {
    uint32_t bits;
    std::memcpy(&bits, &value, 4);
    if (dtype == "bf16") bits = std::isnan(value) ? 0x7fc0 : (bits + 0x7fff + (bits >> 16 & 1)) >> 16;  // to nearest even
    to.append(reinterpret_cast<const char*>(&bits), width(dtype));
}

// Words `name dtype rank sizes...` up to the next semicolon
static std::vector<Tensor> tensors(std::istringstream& words) {
    std::vector<Tensor> found;
    for (std::string name; words >> name && name != ";";) {
        Tensor tensor{name, "", {}, {}, {}};
        int64_t rank, count = 1;
        words >> tensor.dtype >> rank;
        tensor.shape.resize(rank);
        for (int64_t& size : tensor.shape) { words >> size; count *= size; }
        tensor.values.resize(count);
        found.push_back(tensor);
    }
    return found;
}

int main() {
    FILE* answers = fdopen(dup(1), "wb");  // answers go to stdout, and what anybody prints goes to stderr, which reports show
    dup2(2, 1);
    for (std::string line; std::getline(std::cin, line);) {
        std::istringstream words(line);
        std::string body, answer;
        Call call;
        words >> call.word;
        if (call.word != "hello") try {
            std::vector<Tensor> inputs = tensors(words);
            for (Tensor& tensor : inputs) {  // read the question to its end, whatever is the matter with the call
                tensor.bytes.resize(tensor.values.size() * width(tensor.dtype));
                std::cin.read(tensor.bytes.data(), tensor.bytes.size());
            }
            for (Tensor& tensor : inputs) {
                const size_t size = width(tensor.dtype);
                for (size_t i = 0; i < tensor.values.size(); i++) tensor.values[i] = decode(&tensor.bytes[i * size], tensor.dtype);
                call.inputs[tensor.name] = tensor;
            }
            call.outputs = tensors(words);
            for (std::string word; words >> word;) call.options[word.substr(0, word.find('='))] = word.substr(word.find('=') + 1);
            compute(call);
            for (const Tensor& tensor : call.outputs) for (float value : tensor.values) encode(value, tensor.dtype, body);
        } catch (const Refused& error) {
            answer = std::string("refuse ") + error.what() + "\n";
        } catch (const std::exception& error) {
            answer = std::string("error ") + error.what() + "\n";
        }
        if (answer.empty()) answer = "ok " + std::to_string(body.size()) + "\n" + body;
        fwrite(answer.data(), 1, answer.size(), answers);
        fflush(answers);
    }
}
