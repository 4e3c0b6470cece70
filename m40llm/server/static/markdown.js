// Markdown as models write it, to elements. No HTML is parsed or passed through: what is not markup here is text.
// Every scan is linear and nesting is bounded, since the text comes from a model.
import { el, icon } from "./dom.js";

const MAX_DEPTH = 8;
const FENCE = /^ {0,3}(`{3,}|~{3,})([^`]*)$/;
const HEADING = /^ {0,3}(#{1,6})(?:\s+(.*))?$/;
const RULE = /^ {0,3}(?:(?:-\s*){3,}|(?:\*\s*){3,}|(?:_\s*){3,})$/;
const QUOTE = /^ {0,3}> ?(.*)$/;
const ITEM = /^(\s*)([-*+]|\d{1,9}[.)])(\s+|$)(.*)$/;
const TABLE_RULE = /^\|?\s*:?-+:?\s*(?:\|\s*:?-+:?\s*)*\|?$/;

/** The blocks of `text`, as a fragment. An unclosed fence runs to the end, as it does while an answer streams. */
export function renderMarkdown(text) {
  return blocks(text.replace(/\r\n?/g, "\n").replace(/\t/g, "    ").split("\n"), 0);
}

const indentOf = (line) => line.length - line.trimStart().length;
const isTable = (lines, i) => lines[i].includes("|") && i + 1 < lines.length && lines[i + 1].includes("|") && TABLE_RULE.test(lines[i + 1].trim());

/** `## Title ##` is `Title`, `C#` is `C#`. */
function withoutClosingMarks(title) {
  const text = title.trimEnd();
  let end = text.length;
  while (text[end - 1] === "#") end -= 1;
  return end === 0 || text[end - 1] === " " ? text.slice(0, end).trimEnd() : text;
}

function startsBlock(lines, i) {
  const line = lines[i];
  return FENCE.test(line) || HEADING.test(line) || RULE.test(line) || QUOTE.test(line) || ITEM.test(line) || isTable(lines, i);
}

function blocks(lines, depth) {
  const out = document.createDocumentFragment();
  if (depth > MAX_DEPTH) {
    out.append(el("p", {}, lines.join("\n")));
    return out;
  }
  let i = 0;
  while (i < lines.length) {
    const line = lines[i];
    let match;
    if (!line.trim()) {
      i += 1;
    } else if ((match = FENCE.exec(line))) {
      i = fence(lines, i, match, out);
    } else if ((match = HEADING.exec(line))) {
      // The page's own headings are h1 and h2; an answer's start below them.
      const level = Math.min(6, match[1].length + 2);
      out.append(el(`h${level}`, {}, inline(withoutClosingMarks(match[2] ?? ""))));
      i += 1;
    } else if (RULE.test(line)) {
      out.append(el("hr"));
      i += 1;
    } else if (QUOTE.test(line)) {
      const inner = [];
      while (i < lines.length && (match = QUOTE.exec(lines[i]))) {
        inner.push(match[1]);
        i += 1;
      }
      out.append(el("blockquote", {}, blocks(inner, depth + 1)));
    } else if (ITEM.test(line)) {
      i = list(lines, i, out, depth);
    } else if (isTable(lines, i)) {
      i = table(lines, i, out);
    } else {
      const start = i;
      do i += 1;
      while (i < lines.length && lines[i].trim() && !startsBlock(lines, i));
      out.append(el("p", {}, inline(lines.slice(start, i).map((l) => l.trim()).join("\n"))));
    }
  }
  return out;
}

function fence(lines, i, match, out) {
  const [, mark, info] = match;
  const language = info.trim().split(/\s/)[0];
  const indent = indentOf(lines[i]);
  const code = [];
  i += 1;
  while (i < lines.length) {
    const end = lines[i].trim();
    if (end.length >= mark.length && end === mark[0].repeat(end.length)) break;
    code.push(lines[i].slice(Math.min(indent, indentOf(lines[i]))));
    i += 1;
  }
  const copy = el(
    "button",
    { type: "button", class: "text-button copy-code", "aria-label": "Copy the code" },
    icon("copy"),
    el("span", { class: "label" }, "Copy"),
  );
  out.append(
    el(
      "div",
      { class: "code" },
      el("div", { class: "code-head" }, el("span", {}, language || "text"), copy),
      el("pre", { tabindex: "0" }, el("code", {}, code.join("\n"))),
    ),
  );
  return i + 1;
}

function list(lines, i, out, depth) {
  const [, lead, firstMark] = ITEM.exec(lines[i]);
  const ordered = /\d/.test(firstMark);
  const node = ordered ? el("ol", { start: String(parseInt(firstMark, 10)) }) : el("ul");
  const base = lead.length;
  while (i < lines.length) {
    const match = ITEM.exec(lines[i]);
    if (!match || match[1].length > base + 1 || match[1].length < base || /\d/.test(match[2]) !== ordered || RULE.test(lines[i])) break;
    const inner = [match[4]];
    // What is indented further belongs to the item; blank lines do too, if something indented follows them.
    const content = match[1].length + match[2].length + Math.min(match[3].length || 1, 4);
    i += 1;
    while (i < lines.length) {
      if (lines[i].trim()) {
        if (indentOf(lines[i]) <= base + 1) break;
        inner.push(lines[i].slice(Math.min(content, indentOf(lines[i]))));
        i += 1;
      } else {
        let next = i;
        while (next < lines.length && !lines[next].trim()) next += 1;
        if (next === lines.length || indentOf(lines[next]) <= base + 1) {
          if (next < lines.length && ITEM.test(lines[next])) i = next;
          break;
        }
        for (; i < next; i += 1) inner.push("");
      }
    }
    const item = el("li", {}, blocks(inner, depth + 1));
    const paragraphs = [...item.children].filter((child) => child.tagName === "P");
    if (paragraphs.length === 1) paragraphs[0].replaceWith(...paragraphs[0].childNodes);
    node.append(item);
  }
  out.append(node);
  return i;
}

function table(lines, i, out) {
  const cells = (line) => line.trim().replace(/^\|/, "").replace(/\|$/, "").split("|").map((cell) => cell.trim());
  const head = cells(lines[i]);
  const align = cells(lines[i + 1]).map((c) => (c.endsWith(":") ? (c.startsWith(":") ? "center" : "right") : null));
  const row = (values, tag) => el("tr", {}, ...head.map((_, k) => el(tag, { "data-align": align[k] }, inline(values[k] ?? ""))));
  const body = el("tbody");
  const header = row(head, "th");
  i += 2;
  while (i < lines.length && lines[i].includes("|")) {
    body.append(row(cells(lines[i]), "td"));
    i += 1;
  }
  out.append(el("div", { class: "table", tabindex: "0" }, el("table", {}, el("thead", {}, header), body)));
  return i;
}

const LINK = /\[([^[\]]*)\]\(([^()\s]+(?:\([^()\s]*\)[^()\s]*)?)\)/y;
const BARE_URL = /https?:\/\/[^\s<>"'`*]+/y;
const MARKS = [
  ["**", "strong"],
  ["__", "strong"],
  ["~~", "del"],
  ["*", "em"],
  ["_", "em"],
];
const WORD = /[\p{L}\p{N}]/u;

/** Text of one block, as a fragment. */
function inline(text, depth = 0, links = true) {
  const out = document.createDocumentFragment();
  const missing = new Set(); // marks without a closing one ahead: not searched for again
  let plain = "";
  let i = 0;
  const flush = () => {
    plain.split("\n").forEach((part, k) => {
      if (k) out.append(el("br"));
      if (part) out.append(part);
    });
    plain = "";
  };
  const emit = (node, next) => {
    flush();
    out.append(node);
    i = next;
  };
  while (i < text.length) {
    const c = text[i];
    let found = null;
    if (c === "\\" && i + 1 < text.length && /[\\`*_{}[\]()#+\-.!~|<>]/.test(text[i + 1])) {
      plain += text[i + 1];
      i += 2;
      continue;
    }
    if (c === "`") found = codeSpan(text, i);
    else if (c === "[" && links) found = link(text, i, depth);
    else if (c === "h" && links && !WORD.test(text[i - 1] ?? " ")) found = bareUrl(text, i);
    else if ((c === "*" || c === "_" || c === "~") && depth < MAX_DEPTH) found = emphasis(text, i, missing, depth, links);
    if (found) {
      emit(found.node, found.next);
    } else {
      // A run of the same mark that opened nothing is text as a whole.
      const start = i;
      do i += 1;
      while ((c === "`" || c === "*" || c === "_") && text[i] === c);
      plain += text.slice(start, i);
    }
  }
  flush();
  return out;
}

function codeSpan(text, i) {
  let size = 1;
  while (text[i + size] === "`") size += 1;
  const mark = "`".repeat(size);
  let end = text.indexOf(mark, i + size);
  while (end >= 0 && text[end + size] === "`") {
    let past = end + size;
    while (text[past] === "`") past += 1;
    end = text.indexOf(mark, past);
  }
  if (end < 0) return null;
  let code = text.slice(i + size, end).replace(/\n/g, " ");
  if (code.startsWith(" ") && code.endsWith(" ") && code.trim()) code = code.slice(1, -1);
  return { node: el("code", {}, code), next: end + size };
}

/** The address if it is http or https, else null: `javascript:`, `data:` and relative ones stay text. */
function webAddress(text) {
  if (!/^https?:\/\//i.test(text) || !URL.canParse(text)) return null;
  return new URL(text).href;
}

const anchor = (href, ...children) => el("a", { href, target: "_blank", rel: "noopener noreferrer nofollow" }, ...children);

function link(text, i, depth) {
  LINK.lastIndex = i;
  const match = LINK.exec(text);
  const next = LINK.lastIndex;
  const href = match && webAddress(match[2]);
  if (!href) return null;
  return { node: anchor(href, inline(match[1], depth + 1, false)), next };
}

function bareUrl(text, i) {
  BARE_URL.lastIndex = i;
  const match = BARE_URL.exec(text);
  if (!match) return null;
  const address = match[0].replace(/[.,;:!?)\]}]+$/, "");
  const href = webAddress(address);
  return href && { node: anchor(href, address), next: i + address.length };
}

function emphasis(text, i, missing, depth, links) {
  for (const [mark, tag] of MARKS) {
    if (!text.startsWith(mark, i) || missing.has(mark)) continue;
    const inside = i + mark.length;
    if (inside >= text.length || /\s/.test(text[inside])) continue;
    if (mark[0] === "_" && WORD.test(text[i - 1] ?? " ")) continue; // snake_case
    const end = closing(text, inside, mark);
    if (end < 0) {
      missing.add(mark);
      continue;
    }
    return { node: el(tag, {}, inline(text.slice(inside, end), depth + 1, links)), next: end + mark.length };
  }
  return null;
}

/** Where `mark` closes, or -1. */
function closing(text, from, mark) {
  const c = mark[0];
  for (let end = text.indexOf(mark, from + 1); end >= 0; end = text.indexOf(mark, end + 1)) {
    let run = end;
    while (text[run] === c) run += 1;
    const length = run - end;
    const open = /\s/.test(text[end - 1]) || (c === "_" && WORD.test(text[run] ?? " "));
    if (!open && mark.length === 2) return run - 2; // of ***, the outer two
    if (!open && (length === 1 || length === 3)) return end;
    end = run - 1;
  }
  return -1;
}
