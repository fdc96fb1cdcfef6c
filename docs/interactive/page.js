// Controls in, matrices out. Everything shown is recomputed from the inputs of the form on every change.
"use strict";

(() => {
  const WORDS = ["def", "f", "(", "x", ")", ":", "↵", "return", "x", "+", "1", "↵", "f", "(", "2", ")"];
  const T = WORDS.length, K = 4, BLOCK = 2, FADED = 6, SVG = "http://www.w3.org/2000/svg";
  const root = document.getElementById("play"), form = root;
  const field = (name) => form.elements[name];
  const number = (name) => Number(field(name).value);

  const normal = algebra.normals(7);
  const draw = () => Array.from({ length: T }, () => Array.from({ length: K }, normal));
  const q = draw(), k = draw(), scattered = draw().map(algebra.unit), v = draw().map((value) => value.slice(0, 3));
  const axis = algebra.unit([1, 1, 0, 0]);

  // The pairs of the registry, and the controls that their gate parts need.
  const CONTROLS = { log_diag: "channels", angle: "angles", beta: "betas" };
  const control = (pair) => (part) => (part === "log_decay" ? (pair.constant ? "slope" : "gates") : CONTROLS[part] ?? []);
  const PARTS = Object.fromEntries(window.zooPairs.map((pair) => [pair.softmax, pair.requires.flatMap(control(pair))]));
  for (const { linear, softmax } of window.zooPairs) {
    field("pair").append(new Option(`${linear} · ${softmax}`, softmax, softmax === "fox", softmax === "fox"));
  }

  function readGate(parts) {
    const tokens = Array.from({ length: T }, (_, t) => t);
    const gate = { g: tokens.map(() => 0) };
    if (parts.includes("slope")) gate.g = tokens.map(() => -number("slope"));
    if (parts.includes("gates")) gate.g = tokens.map((t) => Math.log(number(`f${t}`)));
    if (parts.includes("channels")) {
      const a = Array.from({ length: K }, (_, i) => Math.log(number(`channel${i}`)));
      gate.a = tokens.map(() => a);
    }
    if (parts.includes("angles")) gate.theta = tokens.map(() => [number("angle0"), number("angle1")]);
    if (parts.includes("betas")) {
      const spread = number("spread");
      gate.beta = tokens.map((t) => number(`beta${t}`));
      gate.w = tokens.map((t) => algebra.unit(axis.map((x, i) => (1 - spread) * x + spread * scattered[t][i])));
    }
    return gate;
  }

  // All that is shown, as numbers.
  function read() {
    const pair = field("pair").value, parts = PARTS[pair], readout = field("readout").value;
    const gate = readGate(parts), scale = number("content") / Math.sqrt(K);
    const prune = { logEps: number("eps") * Math.LN10, bound: field("bound").value, block: BLOCK };
    const { s, d } = algebra.scores(q, k, gate, scale);
    const decay = d.map((row) => row.map(Math.exp));
    const logits = s.map((row, t) => row.map((value, j) => value + d[t][j]));
    const weights =
      readout === "softmax" ? logits.map(algebra.softmax) : s.map((row, t) => row.map((x, j) => x * decay[t][j]));
    const kept = algebra.firstKept(q, k, gate.g, scale, prune);
    const mass = logits.map(algebra.softmax).map((row, t) => sum(row.slice(0, kept[Math.floor(t / BLOCK)])));
    const states = algebra.states(k, v, gate);
    const outputs = {
      linear: states.map((S, t) => S.map((row) => scale * algebra.dot(row, q[t]))),
      softmax: logits.map((row) => v[0].map((_, i) => algebra.dot(algebra.softmax(row), v.slice(0, row.length).map((x) => x[i])))),
    };
    return {
      pair, readout, q, k, v, scale, gate, prune, s, decay, logits, weights, kept, dropped: Math.max(...mass), states, outputs,
    };
  }

  const sum = (row) => row.reduce((a, b) => a + b, 0);

  // One matrix: a square per query t (downwards) and key j (to the right). Colour is a theme colour, the value its opacity.
  class Matrix {
    constructor(name) {
      this.figure = root.querySelector(`[data-matrix="${name}"]`);
      this.svg = document.createElementNS(SVG, "svg");
      this.svg.setAttribute("viewBox", `0 0 ${T + 1} ${T}`); // one column more, for the last word
      this.svg.setAttribute("role", "img");
      this.figure.prepend(this.svg);
      ["columns: keys →", "rows: queries ↓"].forEach((words, row) => this.write(words, T + 1, 1.3 + 1.5 * row, "end"));
      WORDS.forEach((word, t) => this.write(word, t + 1.2, t + 0.75, "start")); // right of the diagonal: row and column
      this.cells = Array.from({ length: T }, (_, t) => Array.from({ length: t + 1 }, (_, j) => this.cell(t, j)));
    }

    write(words, x, y, anchor) {
      const text = this.svg.appendChild(document.createElementNS(SVG, "text"));
      for (const [key, value] of Object.entries({ x, y, "text-anchor": anchor, class: anchor })) text.setAttribute(key, value);
      text.textContent = words;
    }

    cell(t, j) {
      const cell = document.createElementNS(SVG, "rect");
      for (const [key, value] of Object.entries({ x: j + 0.04, y: t + 0.04, width: 0.92, height: 0.92, rx: 0.12 })) {
        cell.setAttribute(key, value);
      }
      cell.addEventListener("pointerenter", () => choose(t, j));
      cell.addEventListener("pointerdown", () => choose(t, j));
      return this.svg.appendChild(cell);
    }

    show(values, opacity, label) {
      values.forEach((row, t) =>
        row.forEach((value, j) => {
          this.cells[t][j].setAttribute("fill-opacity", opacity(value).toFixed(4));
          this.cells[t][j].setAttribute("class", value < 0 ? "minus" : "plus");
        }),
      );
      this.svg.setAttribute("aria-label", label);
    }
  }

  const clamp = (x) => Math.min(Math.max(x, 0), 1);
  const faint = (x) => 0.04 + 0.96 * clamp(x);
  const logarithmic = (x) => faint(1 + Math.log(Math.max(x, 1e-30)) / FADED);
  const matrices = { decay: new Matrix("decay"), logits: new Matrix("logits"), weights: new Matrix("weights") };
  const pruned = matrices.weights.svg.appendChild(document.createElementNS(SVG, "g"));
  pruned.setAttribute("class", "pruned");
  const memory = memoryOf(root, WORDS, (t) => choose(t, Math.min(chosen[1], t)));
  const FIRST = [T - 1, T - 5];
  let chosen = FIRST;

  function choose(t, j) {
    chosen = [t, j];
    describe(read());
  }

  function describe(now) {
    const [t, j] = chosen;
    const text = (x) => (x === 0 || Math.abs(x) >= 1e-3 ? x.toFixed(4) : x === -Infinity ? "−∞" : x.toExponential(2));
    const values = { s: now.s[t][j], decay: now.decay[t][j], logit: now.logits[t][j], weight: now.weights[t][j] };
    root.querySelector("[data-cell]").textContent = `query ${t + 1}, key ${j + 1}`;
    root.querySelector("[data-words]").textContent = `${WORDS[t]} looks at ${t === j ? "itself" : WORDS[j]}`;
    for (const [name, value] of Object.entries(values)) root.querySelector(`[data-value="${name}"]`).textContent = text(value);
    for (const matrix of Object.values(matrices)) {
      matrix.cells.flat().forEach((cell) => cell.removeAttribute("data-chosen"));
      matrix.cells[t][j].setAttribute("data-chosen", "");
    }
    memory.show(now, t);
  }

  function showKept(now) {
    let all = 0, computed = 0;
    pruned.replaceChildren();
    if (now.readout === "linear") return; // a state has no keys to prune
    now.kept.forEach((first, n) => {
      all += n + 1;
      computed += n + 1 - first / BLOCK;
      for (let b = 0; b < first / BLOCK; b++) {
        const block = document.createElementNS(SVG, "path");
        const x = b * BLOCK + 0.1, y = n * BLOCK + 0.1, size = BLOCK - 0.2;
        block.setAttribute("d", `M${x} ${y}h${size}v${size}h${-size}zM${x} ${y}l${size} ${size}m0 ${-size}l${-size} ${size}`);
        pruned.append(block);
      }
    });
    const eps = 10 ** number("eps");
    root.querySelector("[data-kept]").textContent = `${computed} of ${all} blocks computed`;
    root.querySelector("[data-dropped]").textContent =
      `most that a row loses: ${now.dropped ? now.dropped.toExponential(2) : 0} (allowed: ${eps.toPrecision(2)})`;
  }

  function show() {
    const now = read(), parts = PARTS[now.pair];
    root.querySelectorAll("[data-part]").forEach((part) => (part.hidden = !parts.includes(part.dataset.part)));
    root.querySelectorAll("[data-softmax]").forEach((part) => (part.hidden = now.readout === "linear"));
    root.querySelectorAll("[data-linear]").forEach((part) => (part.hidden = now.readout === "softmax"));
    root.querySelectorAll("[data-pair]").forEach((text) => (text.hidden = text.dataset.pair !== now.pair));
    form.querySelectorAll("output[data-for]").forEach((output) => {
      const value = number(output.dataset.for), name = output.dataset.for.replace("-all", "");
      const each = name === output.dataset.for ? [value] : WORDS.map((_, t) => number(`${name}${t}`));
      const [least, most] = [Math.min(...each), Math.max(...each)];
      if (least < most) output.textContent = `${least.toFixed(2)} to ${most.toFixed(2)}`;
      else if (name !== output.dataset.for) output.textContent = most.toFixed(2);
      else output.textContent = output.dataset.for === "eps" ? (10 ** value).toPrecision(2) : value.toFixed(2);
    });
    const largest = (rows) => Math.max(...rows.flat().filter(Number.isFinite).map(Math.abs), 1e-12);
    const inside = now.readout === "softmax" ? now.logits : now.s; // what the weight is made from
    const top = Math.min(largest(inside), 4), most = largest(now.weights);
    matrices.decay.show(now.decay, logarithmic, `decay, between ${range(now.decay)}`);
    const name = now.readout === "softmax" ? "logits" : "scores";
    matrices.logits.show(inside, (x) => faint(Math.abs(x) / top), `${name}, between ${range(inside)}`);
    root.querySelector("[data-logits]").textContent = name === "logits" ? "logits s + d" : "scores s";
    const shade = now.readout === "softmax" ? logarithmic : (x) => faint(Math.sqrt(Math.abs(x) / most));
    matrices.weights.show(now.weights, shade, `weights, between ${range(now.weights)}`);
    root.querySelector("[data-weights]").textContent =
      now.readout === "softmax" ? "weights: softmax" : "weights: s times decay";
    showKept(now);
    describe(now);
  }

  function update() {
    show();
    keep();
  }

  function keep() {
    history.replaceState(null, "", `#=${state()}`); // "=": no element has such an id, to which a browser would scroll
  }

  // The pair, the marked cell and every control that are not as they were at first, as they stand in the address.
  function state() {
    const moved = [...form.elements].filter((e) =>
      e.type === "range" ? e.value !== e.defaultValue : e.type === "radio" && e.checked && !e.defaultChecked);
    const cell = chosen.join() === FIRST.join() ? [] : [`cell=${chosen.join(".")}`];
    return [field("pair").value, ...moved.map((e) => `${e.name}=${e.value}`), ...cell].join(",");
  }

  function restore(text, then = update) {
    const [pair, ...moved] = text.split(",");
    for (const e of form.elements) {
      if (e.type === "range") e.value = e.defaultValue;
      if (e.type === "radio") e.checked = e.defaultChecked;
    }
    if (pair in PARTS) field("pair").value = pair;
    const [t, j] = (/,cell=(\d+)\.(\d+)/.exec(text) ?? []).slice(1).map(Number);
    chosen = t < T && j <= t ? [t, j] : FIRST;
    for (const [name, value] of moved.map((x) => x.split("="))) {
      if (name.endsWith("-all")) for (let t = 0; t < T; t++) field(`${name.slice(0, -4)}${t}`).value = value;
      if (field(name)) field(name).value = value;
    }
    then();
  }

  const range = (rows) => `${Math.min(...rows.flat()).toPrecision(2)} and ${Math.max(...rows.flat()).toPrecision(2)}`;

  function tokenSliders(name, label, max, value) {
    const row = root.querySelector(`[data-tokens="${name}"]`);
    for (let t = 0; t < T; t++) {
      const input = Object.assign(document.createElement("input"), { type: "range", name: `${name}${t}`, min: 0, max, step: 0.01 });
      input.defaultValue = value(t);
      input.setAttribute("aria-label", `${label} of token ${t + 1}, ${WORDS[t]}`);
      const column = Object.assign(document.createElement("span"), { className: "token" });
      column.append(input, Object.assign(document.createElement("code"), { textContent: WORDS[t], className: WORDS[t].length > 1 ? "long" : "" }));
      row.append(column);
    }
    field(`${name}-all`).addEventListener("input", (event) => {
      for (let t = 0; t < T; t++) field(`${name}${t}`).value = event.target.value;
    });
  }

  tokenSliders("f", "forget gate", 1, (t) => (WORDS[t] === "↵" ? 0.02 : [0.9, 0.8, 0.7, 0.95][t % 4]));
  tokenSliders("beta", "beta", 2, (t) => [0.2, 1, 0.4, 1.6][t % 4]);

  root.querySelector(".matrices").addEventListener("keydown", (event) => {
    const step = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] }[event.key];
    if (!step) return;
    event.preventDefault();
    const t = Math.min(Math.max(chosen[0] + step[0], 0), T - 1);
    choose(t, Math.min(Math.max(chosen[1] + step[1], 0), t));
  });
  root.querySelector(".matrices").addEventListener("keyup", keep);
  root.querySelector(".matrices").addEventListener("pointerleave", keep);

  function scene(button, then) {
    restore(button.dataset.scene, then);
    root.querySelector("p[data-says]").textContent = button.dataset.says;
  }

  // without an address the page begins with its first scene, so that the first view has words
  function fromAddress() {
    const address = decodeURIComponent(location.hash).replace(/^#=?/, "");
    if (address) restore(address, show);
    else scene(root.querySelector("[data-scene]"), show);
  }

  form.addEventListener("input", update);
  form.addEventListener("reset", (event) => {
    event.preventDefault();
    restore(field("pair").value);
  });
  root.querySelectorAll("[data-scene]").forEach((button) => button.addEventListener("click", () => scene(button)));
  addEventListener("hashchange", fromAddress);
  root.dataset.ready = "";
  window.attnzoo = { read };
  fromAddress();
})();
