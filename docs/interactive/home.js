// The home page's live picture: three heads of a small trained FoX on a piece of code. Scores and gates are its own; what follows
// from them is computed here.
"use strict";

(() => {
  const root = document.getElementById("live"), { text, heads } = window.foxData;
  const words = [...text], T = words.length;
  const shown = words.map((word) => (word === "\n" ? "↵" : word === " " ? "␣" : word));
  let query = T - 2, gate = text.lastIndexOf("\n", T - 2), moved = null; // moved: the dragged gate, null as trained
  const field = (name) => root.querySelector(`[name=${name}]:checked`).value;

  function weights() {
    const { s, g } = heads[field("head")];
    const gates = g.map((value, t) => (t === gate && moved !== null ? Math.log(moved) : value));
    const decay = s[query].map((_, j) => Math.exp(gates.slice(j + 1, query + 1).reduce((a, b) => a + b, 0)));
    if (field("side") === "linear") return s[query].map((x, j) => x * decay[j]);
    const top = Math.max(...s[query].map((x, j) => x + Math.log(decay[j])));
    const parts = s[query].map((x, j) => decay[j] * Math.exp(x - top));
    const sum = parts.reduce((a, b) => a + b, 0);
    return parts.map((x) => x / sum);
  }

  const buttons = words.map((word, t) => {
    const button = Object.assign(document.createElement("button"), { type: "button", textContent: shown[t] });
    button.setAttribute("aria-label", `token ${t + 1}, ${shown[t]}`);
    button.addEventListener("pointerenter", () => look(t));
    button.addEventListener("focus", () => look(t));
    button.addEventListener("click", () => choose(t));
    return button;
  });
  const code = root.querySelector("[data-code]");
  buttons.forEach((button, t) => code.append(button, ...(words[t] === "\n" ? [document.createElement("br")] : [])));
  const slider = root.querySelector("[name=f]");

  function look(t) {
    query = t;
    show();
  }

  function choose(t) {
    [gate, moved] = [t, null];
    look(t);
    keep();
  }

  function show() {
    const now = weights(), most = Math.max(...now.map(Math.abs), 1e-12);
    buttons.forEach((button, t) => {
      const share = t <= query ? Math.sqrt(Math.abs(now[t]) / most) : 0;
      button.style.setProperty("--share", `${(100 * share).toFixed(1)}%`);
      button.classList.toggle("minus", t <= query && now[t] < 0);
      button.classList.toggle("later", t > query);
      button.classList.toggle("query", t === query);
      button.classList.toggle("gate", t === gate);
    });
    const f = moved ?? Math.exp(heads[field("head")].g[gate]);
    slider.value = f;
    root.querySelector("[data-gate]").textContent = `${shown[gate]} has the gate f = ${f.toFixed(3)}`;
    root.querySelector("[data-place]").textContent = heads[field("head")].place;
  }

  function keep() {
    const state = { q: query, g: gate, ...(moved === null ? {} : { f: moved }), head: field("head"), side: field("side") };
    history.replaceState(null, "", `#=${Object.entries(state).map((pair) => pair.join("=")).join(",")}`);
  }

  function restore() {
    if (!location.hash.startsWith("#=")) return;
    const state = Object.fromEntries(decodeURIComponent(location.hash.slice(2)).split(",").map((x) => x.split("=")));
    const token = (value, other) => (Number(value) >= 0 && Number(value) < T ? Math.floor(Number(value)) : other);
    [query, gate] = [token(state.q, query), token(state.g, gate)];
    moved = state.f === undefined || !(state.f >= 0 && state.f <= 1) ? null : Number(state.f);
    for (const name of ["head", "side"]) {
      const choice = [...root.querySelectorAll(`[name=${name}]`)].find((e) => e.value === state[name]);
      if (choice) choice.checked = true;
    }
  }

  slider.addEventListener("input", () => {
    moved = Number(slider.value);
    show();
    keep();
  });
  root.querySelectorAll("[type=radio]").forEach((e) => e.addEventListener("change", () => (show(), keep())));
  root.querySelector("[data-again]").addEventListener("click", () => {
    moved = null;
    show();
    keep();
  });
  restore();
  show();
  root.dataset.ready = "";
  window.foxLive = { read: () => ({ query, gate, moved, head: Number(field("head")), side: field("side"), weights: weights() }) };
})();
