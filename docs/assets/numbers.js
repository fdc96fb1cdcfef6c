// Equation numbers: each leads to its equation, and a reference shows the formula while the pointer or the focus is on it.
"use strict";

(() => {
  document.querySelectorAll("div.maths[id] .katex-tag").forEach((tag) => {
    tag.addEventListener("click", () => (location.hash = tag.closest(".maths").id));
  });

  const card = Object.assign(document.createElement("div"), { className: "preview", hidden: true, role: "tooltip", id: "preview" });
  document.body.append(card);

  function show(link) {
    const target = document.getElementById(decodeURIComponent(link.hash.slice(1)));
    if (!target || link.pathname !== location.pathname) return; // of another page the title says what it is
    const copy = target.cloneNode(true);
    copy.removeAttribute("id");
    card.replaceChildren(copy);
    card.hidden = false;
    link.setAttribute("aria-describedby", card.id);
    const at = link.getBoundingClientRect(), width = document.documentElement.clientWidth;
    card.style.left = `${Math.max(8, Math.min(at.left, width - card.offsetWidth - 8)) + scrollX}px`;
    const above = at.top > card.offsetHeight + 70; // below the header
    card.style.top = `${(above ? at.top - card.offsetHeight - 6 : at.bottom + 6) + scrollY}px`;
  }

  function hide(link) {
    card.hidden = true;
    link.removeAttribute("aria-describedby");
  }

  document.querySelectorAll("article p a.to-eq, article li a.to-eq").forEach((link) => {
    for (const event of ["pointerenter", "focus"]) link.addEventListener(event, () => show(link));
    for (const event of ["pointerleave", "blur", "click"]) link.addEventListener(event, () => hide(link));
  });
})();
