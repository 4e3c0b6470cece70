// How one message looks. A view is made once and updated while its answer grows.
import { el, fitHeight, icon, iconButton } from "./dom.js";
import { renderMarkdown } from "./markdown.js";

const number = (value, digits) => value.toLocaleString("en", { minimumFractionDigits: digits, maximumFractionDigits: digits });
const rate = (value) => number(value, value < 10 ? 2 : value < 100 ? 1 : 0);

/** `[text, explanation]` of each thing known about an answer. */
function statistics({ state, stats }) {
  const out = [];
  if (stats?.rate) out.push([`${rate(stats.rate)} tok/s`, "Tokens per second after the first"]);
  if (stats?.ttft) out.push([`TTFT ${number(stats.ttft, 2)} s`, "Time to the first token, from sending"]);
  if (stats?.tokens) out.push([`${stats.exact ? "" : "≈ "}${number(stats.tokens, 0)} token${stats.tokens === 1 ? "" : "s"}`, "Length of the answer"]);
  if (Number.isFinite(stats?.cached)) {
    out.push([`${number(stats.cached, 0)} of ${number(stats.prompt, 0)} prompt tokens cached`, "Prompt tokens that needed no computing"]);
  }
  if (state === "stopped") out.push(["stopped", "You stopped this answer"]);
  if (state === "done" && stats?.finish === "length") out.push(["token limit reached", "Raise “Max tokens” in the settings for longer answers"]);
  return out;
}

/** An answer. `update()` shows what `message` holds now; `actions` are `{copy, regenerate}`. */
export function answerView(message, actions) {
  const thought = el("div", { class: "thought" });
  const summary = el("summary", {}, "Reasoning");
  const details = el("details", { class: "reasoning" }, summary, thought);
  const body = el("div", { class: "prose" });
  const error = el("p", { class: "message-error" });
  const stats = el("div", { class: "stats" });
  const footer = el(
    "div",
    { class: "actions" },
    iconButton("copy", "Copy the answer", (event) => actions.copy(message, event.currentTarget)),
    iconButton("retry", "Regenerate", () => actions.regenerate(message), { class: "icon-button regenerate" }),
    stats,
  );
  const node = el("li", { class: "message assistant" }, details, body, error, footer);
  let openByUser = null;
  summary.addEventListener("click", () => {
    openByUser = !details.open;
  });
  let shown = { content: null, reasoning: null };

  function update() {
    const running = message.state === "streaming";
    node.classList.toggle("running", running);
    node.setAttribute("aria-busy", String(running));
    details.hidden = !message.reasoning;
    if (message.reasoning !== shown.reasoning) thought.replaceChildren(renderMarkdown(message.reasoning));
    const thinking = running && !message.content;
    summary.textContent = thinking ? "Thinking…" : message.stats?.thought != null ? `Thought for ${number(message.stats.thought, 1)} s` : "Reasoning";
    details.open = openByUser ?? thinking;
    if (message.content !== shown.content) body.replaceChildren(renderMarkdown(message.content));
    shown = { content: message.content, reasoning: message.reasoning };
    body.classList.toggle("waiting", running && !message.content && !message.reasoning);
    error.hidden = !message.error;
    error.textContent = message.error;
    stats.replaceChildren(...statistics(message).map(([text, title]) => el("span", { title }, text)));
  }
  update();
  return { node, update };
}

/** What the user wrote: text, never markup. `actions` are `{copy, resend, edit}`. */
export function questionView(message, actions) {
  const bubble = el("div", { class: "bubble" }, message.content);
  const footer = el(
    "div",
    { class: "actions" },
    iconButton("retry", "Send again", () => actions.resend(message), { class: "icon-button resend" }),
    iconButton("edit", "Edit and send again", () => edit(), { class: "icon-button edit" }),
    iconButton("copy", "Copy the message", (event) => actions.copy(message, event.currentTarget)),
  );
  const node = el("li", { class: "message user" }, bubble, footer);

  function edit() {
    const area = el("textarea", { class: "edit-area", "aria-label": "Edit the message", rows: 1 });
    area.value = message.content;
    const close = () => {
      form.replaceWith(bubble);
      footer.hidden = false;
      footer.querySelector(".edit").focus();
    };
    const form = el(
      "form",
      {
        class: "edit-form",
        onsubmit: (event) => {
          event.preventDefault();
          if (area.value.trim()) actions.edit(message, area.value.trim());
        },
      },
      area,
      el(
        "div",
        { class: "edit-buttons" },
        el("span", { class: "note" }, "What follows is replaced."),
        el("button", { type: "button", class: "button", onclick: close }, "Cancel"),
        el("button", { type: "submit", class: "button primary" }, "Send"),
      ),
    );
    area.addEventListener("input", () => fitHeight(area));
    area.addEventListener("keydown", (event) => {
      if (event.key === "Escape") {
        event.stopPropagation();
        close();
      } else if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
        event.preventDefault();
        form.requestSubmit();
      }
    });
    bubble.replaceWith(form);
    footer.hidden = true;
    fitHeight(area);
    area.focus();
  }
  return { node, update() {} };
}

/** One line of the conversation list. `actions` are `{open, rename, exportJson, remove}`. */
export function conversationView(conversation, { current, running }, actions) {
  const title = conversation.title || "New chat";
  const open = el(
    "button",
    { type: "button", class: "conversation-open", "aria-current": current ? "true" : null, onclick: () => actions.open(conversation.id) },
    running ? el("span", { class: "dot", title: "Answering" }) : null,
    el("span", { class: "conversation-title" }, title),
  );
  const buttons = el(
    "span",
    { class: "conversation-actions" },
    iconButton("edit", `Rename “${title}”`, rename, { title: "Rename" }),
    iconButton("export", `Export “${title}” as JSON`, () => actions.exportJson(conversation), { title: "Export as JSON" }),
    iconButton("trash", `Delete “${title}”`, () => actions.remove(conversation), { title: "Delete" }),
  );
  const node = el("li", { class: current ? "conversation current" : "conversation", "data-id": conversation.id }, open, buttons);

  function rename() {
    const field = el("input", { class: "rename", "aria-label": "Name of the conversation", maxlength: 120 });
    field.value = conversation.title;
    let ended = false;
    const end = (save) => {
      if (ended) return;
      ended = true;
      actions.rename(conversation, save && field.value.trim() ? field.value.trim() : conversation.title);
    };
    field.addEventListener("keydown", (event) => {
      event.stopPropagation();
      if (event.key === "Enter" || event.key === "Escape") end(event.key === "Enter");
    });
    field.addEventListener("blur", () => end(true));
    node.replaceChildren(field);
    field.focus();
    field.select();
  }
  return node;
}

/** A prompt on the empty page that can be clicked. */
export function suggestionView(text, onclick) {
  return el("button", { type: "button", class: "suggestion", onclick }, el("span", {}, text), icon("send"));
}
