// Renders TeX for tools/maths.py: one JSON array of [tex, display] per line in, one JSON array of {html} or {error} out.
import { createInterface } from "node:readline";
import katex from "katex";

function render([tex, displayMode]) {
  try {
    return { html: katex.renderToString(tex, { displayMode, strict: "error", trust: false }) };
  } catch (error) {
    return { error: String(error.message) };
  }
}

for await (const line of createInterface({ input: process.stdin })) {
  process.stdout.write(JSON.stringify(JSON.parse(line).map(render)) + "\n");
}
