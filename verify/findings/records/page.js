"use strict";
(() => {
  document.documentElement.classList.add("script");
  const field = document.getElementById("filter");
  const boxes = [...document.querySelectorAll("input[name=verdict]")];
  const parts = [...document.querySelectorAll("[data-law]")];
  const count = document.getElementById("count");
  const message = document.getElementById("message");
  const laws = new Map();
  for (const part of parts) {
    laws.set(part.dataset.law, [...(laws.get(part.dataset.law) || []), part]);
  }

  function filter() {
    const words = field.value.toLowerCase().split(/\s+/).filter(Boolean);
    const verdicts = new Set(boxes.filter((box) => box.checked).map((box) => box.value));
    let shown = 0;
    for (const shares of laws.values()) {
      const text = words.length ? shares.map((share) => share.textContent).join(" ").toLowerCase() : "";
      const seen = verdicts.has(shares[0].dataset.verdict) && words.every((word) => text.includes(word));
      shares.forEach((share) => { share.hidden = !seen; });
      shown += seen;
    }
    count.textContent = `${shown} of ${laws.size} laws`;
  }

  function selected(code) {
    const range = document.createRange();
    range.selectNodeContents(code);
    getSelection().removeAllRanges();
    getSelection().addRange(range);
    return document.execCommand("copy");
  }

  async function copy(button) {
    const code = document.getElementById(button.dataset.copy);
    let copied = true;
    try {
      await navigator.clipboard.writeText(code.textContent);
    } catch {
      copied = selected(code);
    }
    button.textContent = copied ? "Copied" : "Selected";
    message.textContent = copied ? "The command was copied." : "The command is selected.";
    setTimeout(() => { button.textContent = "Copy"; message.textContent = ""; }, 2000);
  }

  if (field) {
    field.addEventListener("input", filter);
    boxes.forEach((box) => box.addEventListener("change", filter));
    filter();
  }
  document.querySelectorAll("button[data-copy]").forEach((button) => button.addEventListener("click", () => copy(button)));
})();
