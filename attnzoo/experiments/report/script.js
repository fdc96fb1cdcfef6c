// Pointing at a variant shows it and fades the others in every figure; pressing its button keeps it so.
(() => {
  const pressed = new Set();
  const show = (keys) => {
    document.body.classList.toggle("focus", keys.size > 0);
    for (const element of document.querySelectorAll("[data-series]"))
      element.classList.toggle("on", keys.has(element.dataset.series));
  };
  for (const button of document.querySelectorAll(".legend button")) {
    const key = button.dataset.series;
    button.addEventListener("click", () => {
      pressed.has(key) ? pressed.delete(key) : pressed.add(key);
      button.setAttribute("aria-pressed", pressed.has(key));
      show(pressed);
    });
    button.addEventListener("pointerenter", (event) => event.pointerType === "mouse" && show(new Set([...pressed, key])));
    button.addEventListener("pointerleave", () => show(pressed));
  }
})();
