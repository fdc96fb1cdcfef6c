// A small FoX, evaluated: bytes in, what every head sees and the logits of the next byte out, in double precision, from the weights
// that docs/figures/home.py writes. It is attnzoo's LanguageModel with the block "pro", token by token.
"use strict";

const foxModel = (() => {
  const bytes = (text) => Uint8Array.from(atob(text), (letter) => letter.charCodeAt(0));

  // The tensors as flat arrays: float32, or a row of int8 times the row's scale, which is the upper half of a float32.
  function open({ tensors, ...sizes }) {
    const weights = {};
    for (const [name, { float32, int8, scale }] of Object.entries(tensors)) {
      if (float32) {
        weights[name] = Float64Array.from(new Float32Array(bytes(float32).buffer));
        continue;
      }
      const rows = Uint32Array.from(new Uint16Array(bytes(scale).buffer), (half) => half << 16);
      const scales = new Float32Array(rows.buffer), values = new Int8Array(bytes(int8).buffer);
      const width = values.length / scales.length;
      weights[name] = Float64Array.from(values, (value, i) => value * scales[Math.floor(i / width)]);
    }
    return { ...sizes, weights };
  }

  // x [T, D] times the transpose of weight [N, D], T a multiple of 4 and N of 2: what is read serves eight sums at a time
  function linear(x, weight, D) {
    const T = x.length / D, N = weight.length / D, y = new Float64Array(T * N);
    for (let n = 0; n < N; n += 2) {
      for (let t = 0; t < T; t += 4) {
        let a = 0, b = 0, c = 0, d = 0, e = 0, f = 0, g = 0, h = 0;
        for (let i = 0, p = t * D, r = n * D; i < D; i++, p++, r++) {
          const one = weight[r], two = weight[r + D], x0 = x[p], x1 = x[p + D], x2 = x[p + 2 * D], x3 = x[p + 3 * D];
          a += one * x0; b += one * x1; c += one * x2; d += one * x3;
          e += two * x0; f += two * x1; g += two * x2; h += two * x3;
        }
        const at = t * N + n;
        y[at] = a; y[at + N] = b; y[at + 2 * N] = c; y[at + 3 * N] = d;
        y[at + 1] = e; y[at + N + 1] = f; y[at + 2 * N + 1] = g; y[at + 3 * N + 1] = h;
      }
    }
    return y;
  }

  // pieces of `size` channels over the root of their mean square, times a weight that repeats
  function rmsNorm(x, size, weight, eps) {
    const y = new Float64Array(x.length);
    for (let start = 0; start < x.length; start += size) {
      let squares = 0;
      for (let i = start; i < start + size; i++) squares += x[i] * x[i];
      const factor = 1 / Math.sqrt(squares / size + eps);
      for (let i = start; i < start + size; i++) y[i] = x[i] * factor * weight[i % weight.length];
    }
    return y;
  }

  const sigmoid = (x) => 1 / (1 + Math.exp(-x));
  const logSigmoid = (x) => Math.min(x, 0) - Math.log1p(Math.exp(-Math.abs(x)));
  const plus = (x, y) => x.map((value, i) => value + y[i]);

  // y_t = a_t x_{t-1} + (1 - a_t) x_t, with a_t [T, H]; zeros come before the first token
  function shift(x, a, H) {
    const T = a.length / H, D = x.length / T;
    return x.map((value, i) => {
      const share = sigmoid(a[Math.floor(i / D) * H + Math.floor(((i % D) * H) / D)]);
      return share * (i < D ? 0 : x[i - D]) + (1 - share) * value;
    });
  }

  function transposed(x, T) {
    const K = x.length / T, y = new Float64Array(x.length);
    for (let t = 0; t < T; t++) for (let i = 0; i < K; i++) y[i * T + t] = x[t * K + i];
    return y;
  }

  // K channels of x [T, D] from one on
  function columns(x, T, from, K) {
    const D = x.length / T, y = new Float64Array(T * K);
    for (let t = 0; t < T; t++) y.set(x.subarray(t * D + from, t * D + from + K), t * K);
    return y;
  }

  // One head: scores s [T, T] of q and k [T, K], log gates g [T], what each token takes of those before it, w [T, T], and
  // what it gets of v [T, K]. Only the lower triangles count.
  function attend(q, k, v, g, readout) {
    const T = g.length, K = q.length / T;
    const s = linear(q.map((value) => value / Math.sqrt(K)), k, K), w = new Float64Array(T * T);
    for (let t = 0; t < T; t++) {
      const row = t * T;
      let top = -Infinity, sum = 0;
      for (let j = t, decay = 0; j >= 0; decay += g[j], j--) {
        w[row + j] = readout === "softmax" ? s[row + j] + decay : s[row + j] * Math.exp(decay);
        top = Math.max(top, w[row + j]);
      }
      if (readout === "linear") continue;
      for (let j = 0; j <= t; j++) sum += w[row + j] = Math.exp(w[row + j] - top);
      for (let j = 0; j <= t; j++) w[row + j] /= sum;
    }
    return { s, g, w, o: linear(w, transposed(v, T), T) };
  }

  // tokens: bytes. readout: "softmax" or "linear". moved: { token, f } in every head, or { token, f, layer, head } in one.
  // Gives seen[layer][head] = { s, g, w } and logits [T, 256], where T is filled up to a multiple of 4: later tokens change no
  // earlier one.
  function run({ hidden, layers, heads, weights }, tokens, { readout = "softmax", moved = null } = {}) {
    const T = Math.ceil(tokens.length / 4) * 4, D = hidden, H = heads, K = D / H, seen = [];
    let x = new Float64Array(T * D);
    tokens.forEach((token, t) => x.set(weights["embedding.weight"].subarray(token * D, (token + 1) * D), t * D));
    for (let layer = 0; layer < layers; layer++) {
      const of = (name) => weights[`blocks.${layer}.${name}`];
      const normed = rmsNorm(x, D, of("attention_norm.weight"), 1e-6);
      const project = (name) => linear(normed, of(`attention.${name}.weight`), D);
      const q = rmsNorm(project("q_proj"), K, of("attention.q_norm.weight"), 1e-5);
      const k = rmsNorm(shift(project("k_proj"), project("k_shift.proj"), H), K, of("attention.k_norm.weight"), 1e-5);
      const v = shift(project("v_proj"), project("v_shift.proj"), H);
      const eta = project("gate.forget_proj"), bias = of("attention.gate.forget_proj.bias"), o = new Float64Array(T * D);
      seen.push(Array.from({ length: H }, (_, h) => {
        const part = (y) => columns(y, T, h * K, K), g = columns(eta, T, h, 1).map((value) => logSigmoid(value + bias[h]));
        if (moved && (moved.head === undefined || (moved.layer === layer && moved.head === h))) g[moved.token] = Math.log(moved.f);
        const head = attend(part(q), part(k), part(v), g, readout);
        for (let t = 0; t < T; t++) o.set(head.o.subarray(t * K, (t + 1) * K), t * D + h * K);
        return head;
      }));
      const gate = project("output_gate"), out = rmsNorm(o, K, of("attention.output_norm.weight"), 1e-6);
      x = plus(x, linear(out.map((value, i) => value * sigmoid(gate[i])), of("attention.o_proj.weight"), D));
      const wide = rmsNorm(x, D, of("mlp_norm.weight"), 1e-6), up = linear(wide, of("mlp.up.weight"), D);
      const inside = linear(wide, of("mlp.gate.weight"), D).map((value, i) => value * sigmoid(value) * up[i]);
      x = plus(x, linear(inside, of("mlp.down.weight"), inside.length / T));
    }
    return { seen, T, logits: linear(rmsNorm(x, D, weights["norm.weight"], 1e-6), weights["embedding.weight"], D) };
  }

  return { open, run };
})();
if (typeof module !== "undefined") module.exports = foxModel;
