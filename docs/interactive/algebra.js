// The algebra of one head, token by token, as attnzoo/algebra/oracle.py and attnzoo/algebra/pruning.py have it. Vectors are arrays,
// matrices arrays of rows, tokens count from 0. A gate has per token: g <= 0 and, where the pair needs them, a [K] <= 0,
// theta [K/2], w [K] of length 1 and beta in [0, 2].
"use strict";

const algebra = (() => {
  const dot = (x, y) => x.reduce((sum, value, i) => sum + value * y[i], 0);
  const norm = (x) => Math.sqrt(dot(x, x));

  // R^T x with R = Diag(e^a) Rot(theta) (I - beta w w^T), so the factors act from the left one on
  function carry(gate, t, x) {
    let y = gate.a ? x.map((value, i) => value * Math.exp(gate.a[t][i])) : [...x];
    if (gate.theta) {
      y = y.map((value, i) => {
        const angle = gate.theta[t][i >> 1];
        return i % 2
          ? Math.cos(angle) * value - Math.sin(angle) * y[i - 1]
          : Math.cos(angle) * value + Math.sin(angle) * y[i + 1];
      });
    }
    if (gate.w) {
      const along = gate.beta[t] * dot(gate.w[t], y);
      y = y.map((value, i) => value - along * gate.w[t][i]);
    }
    return y;
  }

  // s[t][j] = scale k_j^T R_{j+1} ... R_t q_t and d[t][j] = g_{j+1} + ... + g_t, for j <= t
  function scores(q, k, gate, scale) {
    let keys = [], past = [];
    const s = [], d = [];
    q.forEach((query, t) => {
      keys = [...keys.map((key) => carry(gate, t, key)), k[t]];
      past = [...past.map((sum) => sum + gate.g[t]), 0];
      s.push(keys.map((key) => scale * dot(key, query)));
      d.push(past);
    });
    return { s, d };
  }

  // S_t, rows of values and columns of keys, after every token: S_{t-1} A_t + v_t k_t^T
  function states(k, v, gate) {
    let S = v[0].map(() => k[0].map(() => 0));
    return k.map((key, t) => {
      const left = Math.exp(gate.g[t]);
      S = S.map((row, i) => carry(gate, t, row).map((x, r) => left * x + v[t][i] * key[r]));
      return S;
    });
  }

  function softmax(row) {
    const top = Math.max(...row);
    const weights = row.map((value) => Math.exp(value - top));
    const sum = weights.reduce((a, b) => a + b, 0);
    return weights.map((value) => value / sum);
  }

  // The first key that each block of rows must see; q is scaled here.
  function firstKept(q, k, g, scale, { logEps, bound, block }) {
    const N = k.length;
    const c = [];
    g.reduce((sum, value, t) => (c[t] = sum + (value === -Infinity ? 0 : value)), 0); // closed gates count as open
    const queries = q.map((query) => scale * norm(query)), keys = k.map(norm);
    const starts = Array.from({ length: Math.ceil(N / block) }, (_, n) => n * block);
    const largestKey = Math.max(...keys);
    const tail = []; // log of the sum of exp(-c_l) over l <= b
    for (let b = 0; b < N; b++) {
      const last = b ? tail[b - 1] : -Infinity, top = Math.max(last, -c[b]);
      tail.push(top + Math.log(Math.exp(last - top) + Math.exp(-c[b] - top)));
    }
    const upper = Math.max(...queries) * largestKey;
    const first = starts.map((start) => {
      let count;
      if (bound === "paper") {
        count = c.filter((sum) => -sum < -(2 * upper + Math.log(N)) + logEps - c[start]).length;
      } else {
        let worst = -Infinity;
        for (let t = start; t < Math.min(start + block, N); t++) {
          worst = Math.max(worst, queries[t] * largestKey - scale * dot(q[t], k[t]) + c[t]);
        }
        count = tail.filter((sum) => sum <= logEps - worst).length;
      }
      for (let t = 1; t <= start; t++) if (g[t] === -Infinity) count = Math.max(count, t); // nothing passes a closed gate
      return Math.floor(Math.min(count, start) / block) * block;
    });
    for (let n = first.length - 2; n >= 0; n--) first[n] = Math.min(first[n], first[n + 1]);
    return first;
  }

  // The same normal numbers on every visit: a linear congruential generator and Box and Muller's transform.
  function normals(seed) {
    let state = seed;
    const uniform = () => (state = (1664525 * state + 1013904223) % 4294967296) / 4294967296;
    return () => Math.sqrt(-2 * Math.log(1 - uniform())) * Math.cos(2 * Math.PI * uniform());
  }

  const unit = (x) => x.map((value) => value / norm(x));

  return { dot, scores, states, softmax, firstKept, normals, unit };
})();
