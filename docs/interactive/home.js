// The home page's live picture: a small trained FoX reads a piece of code. Its weights come once the page is shown; from then on
// all that is seen is computed here from them.
"use strict";

(() => {
  const GIVEN = "def width(self):\n    return self._width\n\ndef height(self):\n    return self._height\n";
  const FIRST = { token: GIVEN.indexOf("\n\n"), head: "2.1" }; // it looks back at the blank behind return
  const MOST = 160; // bytes: what it was trained to see at once
  const root = document.getElementById("live"), part = (name) => root.querySelector(`[data-${name}]`);
  const { text: box, f: slider, head: choice } = root.elements;
  const chosen = (name) => root.elements[name].value;
  const weightsFile = new URL("fox_weights.js", document.currentScript.src);

  // What is looked at: a text, the token that looks, the token whose gate may be dragged, and that gate, null as trained.
  let bytes, query, gate, moved = null, model, trained, now;
  let looks = false; // a finger cannot point: its first tap only looks

  const symbol = (byte) => ({ 0: "end", 9: "⇥", 10: "↵", 32: "␣" })[byte] ??
    (byte > 32 && byte < 127 ? String.fromCharCode(byte) : `x${byte.toString(16).padStart(2, "0")}`);
  const short = (f) => String(Number(f.toPrecision(2)));
  const sum = (values) => values.reduce((a, b) => a + b, 0);

  // logarithms of what the model expects after token t
  function expected({ logits }, t) {
    const row = logits.subarray(256 * t, 256 * (t + 1)), top = Math.max(...row);
    const all = top + Math.log(sum(row.map((value) => Math.exp(value - top))));
    return row.map((value) => value - all);
  }

  // of every byte but the first, given those before it; 0 where there are none
  const bits = (result) => -sum(bytes.slice(1).map((byte, t) => expected(result, t)[byte])) / Math.LN2 / Math.max(bytes.length - 1, 1);

  function place(value = choice.value) {
    const [layer, head] = value.split(".").map(Number);
    return { layer, head };
  }

  // How the chosen head sees the token's past: scores, log gates and the weights that follow.
  function seen(result, t = query) {
    const { layer, head } = place(), { s, g, w } = result.seen[layer][head];
    const row = (x) => Array.from(x.subarray(t * result.T, t * result.T + t + 1));
    return { s: row(s), g: Array.from(g.subarray(0, bytes.length)), w: row(w) };
  }

  function evaluate() {
    if (!model) return;
    const readout = chosen("side"), where = chosen("where") === "all" ? {} : place();
    const change = moved === null ? null : { token: gate, f: moved, ...where };
    now = change || readout === "linear" ? foxModel.run(model, bytes, { readout, moved: change }) : trained;
  }

  // A new text: as many of its bytes as the model has seen at once.
  function take(text) {
    bytes = [...new TextEncoder().encode(text).subarray(0, MOST)];
    if (!bytes.length) bytes = [10];
    query = text === GIVEN ? FIRST.token : bytes.length - 1;
    gate = text === GIVEN ? FIRST.token : Math.max(bytes.lastIndexOf(10, query - 1), 0);
    moved = null;
    const code = part("code");
    code.replaceChildren(...bytes.flatMap((byte, t) => {
      const button = Object.assign(document.createElement("button"), { type: "button", textContent: symbol(byte), tabIndex: -1 });
      button.setAttribute("aria-label", `token ${t + 1}, ${symbol(byte)}`);
      button.addEventListener("pointerenter", ({ pointerType }) => {
        looks = pointerType === "touch" && t !== query;
        look(t);
      });
      button.addEventListener("focus", () => look(t));
      button.addEventListener("click", () => (looks ? keep() : choose(t)));
      return byte === 10 ? [button, document.createElement("br")] : [button];
    }));
    part("length").textContent = `${bytes.length} of ${MOST} bytes`;
    if (!model) return;
    trained = foxModel.run(model, bytes);
    for (const option of choice.options) {
      const { layer, head } = place(option.value), { w } = trained.seen[layer][head];
      const back = bytes.map((_, t) => sum(bytes.slice(0, t + 1).map((_, j) => w[t * trained.T + j] * (t - j))));
      option.textContent = `layer ${layer + 1}, head ${head + 1}: ${(sum(back) / bytes.length).toFixed(1)} bytes back`;
    }
  }

  function look(t) {
    query = t;
    show();
  }

  function choose(t) {
    [gate, moved] = [t, null];
    evaluate();
    look(t);
    keep();
  }

  function show() {
    const buttons = [...part("code").querySelectorAll("button")];
    const weights = now ? seen(now).w : [], most = Math.max(...weights.map(Math.abs), 1e-12);
    buttons.forEach((button, t) => {
      button.style.setProperty("--share", `${(100 * Math.sqrt(Math.abs(weights[t] ?? 0) / most)).toFixed(1)}%`);
      button.classList.toggle("minus", weights[t] < 0);
      button.classList.toggle("later", t > query);
      button.classList.toggle("query", t === query);
      button.classList.toggle("gate", t === gate);
      button.tabIndex = t === query ? 0 : -1;
    });
    if (!now) return;
    const was = Math.exp(seen(trained).g[gate]), f = moved ?? was;
    slider.value = Math.max(Math.log(f), slider.min);
    slider.ariaValueText = `f = ${short(f)}`;
    part("gate").textContent = `${symbol(bytes[gate])} f = ${short(f)}, trained ${short(was)}`;
    guess();
  }

  // The five likeliest next bytes after the token, with what they were as trained.
  function guess() {
    const [p, before] = [now, trained].map((result) => expected(result, query).map(Math.exp));
    const percent = (x) => `${(100 * x).toFixed(1)}%`;
    const best = [...p.keys()].sort((a, b) => p[b] - p[a]).slice(0, 5);
    part("after").textContent = bytes.slice(Math.max(query - 7, 0), query + 1).map(symbol).join("");
    root.querySelectorAll("[data-guesses] li").forEach((row, i) => {
      const byte = best[i];
      row.querySelector("code").textContent = symbol(byte);
      row.querySelector("span:last-child").textContent = percent(p[byte]);
      row.style.setProperty("--now", percent(p[byte]));
      row.style.setProperty("--was", percent(before[byte]));
      row.classList.toggle("true", byte === bytes[query + 1]);
    });
    part("bits").textContent = `This text costs the model ${bits(now).toFixed(2)} bits a byte; with the gates as trained ${bits(trained).toFixed(2)}`;
    part("caveat").classList.toggle("off", chosen("side") === "softmax");
  }

  // Everything that can be moved stands in the address. "=": no element has such an id, to which a browser would scroll.
  function keep() {
    if (!model) return;
    const state = new URLSearchParams({ q: query, g: gate, head: choice.value, side: chosen("side"), where: chosen("where") });
    if (moved !== null) state.set("f", moved);
    if (box.value !== GIVEN) state.set("text", box.value);
    history.replaceState(null, "", `#=${state}`);
  }

  function restore() {
    const state = new URLSearchParams(location.hash.startsWith("#=") ? location.hash.slice(2) : "");
    box.value = state.get("text") ?? GIVEN;
    for (const name of ["head", "side", "where"]) {
      const field = root.elements[name], known = [...(field.options ?? field)].map((option) => option.value);
      if (known.includes(state.get(name))) field.value = state.get(name);
    }
    take(box.value);
    const token = (name, other) => ([...bytes.keys()].map(String).includes(state.get(name)) ? Number(state.get(name)) : other);
    [query, gate] = [token("q", query), token("g", gate)];
    const f = parseFloat(state.get("f"));
    moved = f >= 0 && f <= 1 ? f : null;
    evaluate();
    show();
  }

  function change() {
    evaluate();
    show();
    keep();
  }

  // its places are logarithms, but that the last one stands for a closed gate
  slider.addEventListener("input", () => {
    moved = slider.value === slider.min ? 0 : Number(Math.exp(slider.value).toPrecision(3));
    evaluate();
    show();
  });
  slider.addEventListener("change", keep);
  part("again").addEventListener("click", () => {
    moved = null;
    change();
  });
  root.addEventListener("change", (event) => event.target.matches("[type=radio], select") && change());
  box.addEventListener("input", () => {
    take(box.value);
    change();
  });
  part("given").addEventListener("click", () => {
    take(box.value = GIVEN);
    change();
  });
  part("code").addEventListener("pointerleave", keep);
  part("code").addEventListener("keydown", ({ key }) => {
    const to = { ArrowLeft: query - 1, ArrowRight: query + 1, Home: 0, End: bytes.length - 1 }[key];
    if (to >= 0 && to < bytes.length) part("code").querySelectorAll("button")[to].focus();
  });
  part("code").addEventListener("keyup", keep);
  root.addEventListener("submit", (event) => event.preventDefault());
  addEventListener("hashchange", () => location.hash.startsWith("#=") && restore());

  restore();
  const script = Object.assign(document.createElement("script"), { src: weightsFile });
  script.addEventListener("load", () => {
    model = foxModel.open(window.foxWeights);
    for (let n = 0; n < model.layers * model.heads; n++) {
      choice.append(new Option("", `${Math.floor(n / model.heads)}.${n % model.heads}`));
    }
    choice.value = FIRST.head;
    restore();
    root.querySelector("fieldset").disabled = false;
    root.dataset.ready = "";
  });
  document.head.append(script);
  const read = () => ({
    bytes, query, gate, moved, head: choice.value, side: chosen("side"), where: chosen("where"),
    ...seen(now), next: Array.from(expected(now, query), Math.exp), bits: bits(now),
  });
  window.foxLive = { read };
})();
