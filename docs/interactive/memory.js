// What each side remembers after a token: the state of fixed size, the growing cache, and the output that is read from each.
"use strict";

function memoryOf(root, words, choose) {
  const SVG = "http://www.w3.org/2000/svg", T = words.length;
  const part = (name) => root.querySelector(`[data-memory="${name}"]`);
  const step = part("token"), play = part("play");
  let shown = T - 1, timer = null;

  // a square per number: blue above 0, orange below, the more the larger
  function grid(name, rows, most, label) {
    const svg = part(name);
    const columns = rows[0].length, height = Math.max(rows.length, 3);
    svg.setAttribute("viewBox", `0 0 ${columns} ${height}`);
    svg.setAttribute("aria-label", label);
    svg.replaceChildren(...rows.flatMap((row, y) => row.map((value, x) => {
      const cell = document.createElementNS(SVG, "rect");
      const shape = { x: x + 0.05, y: y + 0.05, width: 0.9, height: 0.9, rx: 0.1 };
      for (const [key, size] of Object.entries(shape)) cell.setAttribute(key, size);
      cell.setAttribute("class", value < 0 ? "minus" : "plus");
      cell.setAttribute("fill-opacity", (0.05 + 0.95 * Math.min(Math.abs(value) / most, 1)).toFixed(3));
      return cell;
    })));
  }

  const largest = (rows) => Math.max(...rows.flat().filter(Number.isFinite).map(Math.abs), 1e-12);

  function show(now, t) {
    shown = t;
    step.value = t;
    part("word").textContent = `after token ${t + 1}, ${words[t]}`;
    grid("state", now.states[t], largest(now.states.flat()), `state of 3 times 4 numbers after token ${t + 1}`);
    const cache = now.k.slice(0, t + 1).map((key, j) => [...key, ...now.v[j]]);
    const room = now.k.map((key, j) => [...key, ...now.v[j]]);
    grid("cache", cache, largest(room), `cache of ${t + 1} keys and values`);
    part("size").textContent = `${7 * (t + 1)} numbers`;
    for (const side of ["linear", "softmax"]) {
      const most = largest(now.outputs[side]);
      grid(`output-${side}`, [now.outputs[side][t]], most, `what the ${side === "linear" ? "recurrence" : "attention"} reads after token ${t + 1}`);
      part(`said-${side}`).textContent = now.outputs[side][t].map((x) => x.toFixed(2)).join(", ");
    }
  }

  function stop() {
    clearInterval(timer);
    timer = null;
    play.textContent = "play";
  }

  step.addEventListener("input", (event) => {
    event.stopPropagation(); // it moves no gate
    choose(Number(step.value));
  });
  play.addEventListener("click", () => {
    if (timer) return stop();
    play.textContent = "stop";
    choose(shown === T - 1 ? 0 : shown);
    timer = setInterval(() => (shown === T - 1 ? stop() : choose(shown + 1)), 500);
  });
  return { show };
}
