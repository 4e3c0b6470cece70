// Building elements. Text is only ever set as text: nothing on this page parses HTML (its policy forbids it).

/** A new element; `props` are attributes, `onclick` and the like listeners; null children are left out. */
export function el(tag, props = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(props)) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else node.setAttribute(name, value === true ? "" : value);
  }
  node.append(...children.filter((child) => child !== null && child !== undefined));
  return node;
}

/** An icon of the sprite in index.html. */
export function icon(name) {
  const svg = document.createElementNS("http://www.w3.org/2000/svg", "svg");
  const use = document.createElementNS("http://www.w3.org/2000/svg", "use");
  use.setAttribute("href", `#i-${name}`);
  svg.setAttribute("aria-hidden", "true");
  svg.append(use);
  return svg;
}

export function iconButton(name, label, onclick, extra = {}) {
  return el("button", { type: "button", class: "icon-button", "aria-label": label, title: label, onclick, ...extra }, icon(name));
}

export const byId = (id) => document.getElementById(id);

/** Copies, and shows a tick on `button` for a moment. */
export async function copyText(text, button) {
  if (navigator.clipboard) {
    await navigator.clipboard.writeText(text);
  } else {
    // The clipboard API exists in secure contexts only; a server on the local network by plain HTTP is none.
    const area = el("textarea", { class: "visually-hidden", readonly: true });
    area.value = text;
    document.body.append(area);
    area.select();
    const done = document.execCommand("copy");
    area.remove();
    button.focus();
    if (!done) throw new Error("the browser refused to copy");
  }
  const use = button.querySelector("use");
  const label = button.querySelector(".label");
  use?.setAttribute("href", "#i-check");
  if (label) label.textContent = "Copied";
  setTimeout(() => {
    use?.setAttribute("href", "#i-copy");
    if (label) label.textContent = "Copy";
  }, 1500);
}

/** A textarea as high as its text, up to the CSS max-height. */
export function fitHeight(area) {
  area.style.height = "auto";
  area.style.height = `${area.scrollHeight + area.offsetHeight - area.clientHeight}px`;
}
