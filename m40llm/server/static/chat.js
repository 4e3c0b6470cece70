// The page's state and what the user does with it: conversations, running answers, the server.
import { byId, copyText, fitHeight } from "./dom.js";
import { answerView, conversationView, questionView, suggestionView } from "./messages.js";
import { startRun, take } from "./run.js";
import { apiKey, openSettings, setUpSettings, showDefaults, showSettings } from "./settings.js";
import {
  conversationOf,
  lastOpen,
  loadConversation,
  loadConversations,
  newConversation,
  removeConversation,
  saveConversation,
  setLastOpen,
} from "./store.js";
import { ApiError, getJson, streamChat } from "./stream.js";

const SUGGESTIONS = [
  "Explain how a hash table works, with a small example",
  "Write a Python function that merges two sorted lists",
  "Give me three ideas for a rainy afternoon",
  "Draft a short, polite reply that declines a meeting",
];
const RETRY_MS = 3000;
const SAVE_MS = 1000;
const TITLE_LENGTH = 60;

const { conversations, damaged } = loadConversations();
const runs = new Map(); // conversation id → its running answer
const failures = new Map(); // conversation id → {text, retry}
let current = null;
let views = new Map(); // message → its view, of the current conversation
let model = null;

// ---- storage

function save(conversation) {
  conversation.updated = Date.now();
  if (!conversations.has(conversation.id)) return; // deleted while its answer ran
  try {
    saveConversation(conversation);
  } catch {
    fail(conversation, "The browser could not store this conversation. Export it, and delete some others if the storage is full.", false);
  }
}

// ---- what is on the screen

function open(conversation) {
  current = conversation;
  setLastOpen(conversation.id);
  views = new Map();
  showMessages();
  showList();
  showStatus();
  showSettings(conversation);
  closeSidebar();
  scrollToEnd();
}

function showMessages() {
  const fresh = new Map();
  for (const message of current.messages) {
    fresh.set(message, views.get(message) ?? (message.role === "user" ? questionView : answerView)(message, messageActions));
  }
  views = fresh;
  const list = byId("messages");
  const nodes = [...views.values()].map((view) => view.node);
  if (nodes.length !== list.children.length || nodes.some((node, i) => node !== list.children[i])) list.replaceChildren(...nodes);
  for (const view of views.values()) view.update();
  byId("welcome").hidden = current.messages.length > 0;
}

function showList() {
  if (document.activeElement?.classList.contains("rename")) return; // do not pull the field away from under the user
  const sorted = [...conversations.values()].sort((a, b) => b.updated - a.updated);
  byId("conversations").replaceChildren(
    ...sorted.map((c) => conversationView(c, { current: c === current, running: runs.has(c.id) }, conversationActions)),
  );
}

function showStatus() {
  const running = runs.has(current.id);
  byId("main").classList.toggle("is-running", running);
  byId("send").hidden = running;
  byId("stop").hidden = !running;
  byId("title").textContent = current.title || "New chat";
  document.title = current.title ? `${current.title} · m40llm` : "m40llm";
  const failure = failures.get(current.id);
  byId("error").hidden = !failure;
  byId("error-text").textContent = failure?.text ?? "";
  byId("error-retry").hidden = !failure?.retry;
}

function fail(conversation, text, retry) {
  failures.set(conversation.id, { text, retry });
  if (conversation === current) showStatus();
}

const announce = (text) => {
  byId("announce").textContent = text;
};

// ---- scrolling: the newest text stays in view until the user scrolls up

const scroller = byId("scroller");
const atEnd = () => scroller.scrollHeight - scroller.scrollTop - scroller.clientHeight < 48;
let following = true;

function scrollToEnd() {
  following = true;
  scroller.scrollTop = scroller.scrollHeight;
  byId("jump").hidden = true;
}

scroller.addEventListener("scroll", () => {
  following = atEnd();
  byId("jump").hidden = following;
});
byId("jump").addEventListener("click", scrollToEnd);
new ResizeObserver(() => (following ? scrollToEnd() : (byId("jump").hidden = atEnd()))).observe(byId("messages"));

// ---- answers

/** Asks for the answer to what the conversation ends with. */
async function answer(conversation) {
  const messages = conversation.messages.map(({ role, content }) => ({ role, content }));
  if (conversation.system.trim()) messages.unshift({ role: "system", content: conversation.system });
  const run = startRun();
  const { message } = run;
  conversation.messages.push(message);
  runs.set(conversation.id, run);
  failures.delete(conversation.id);
  save(conversation);
  refresh(conversation);
  if (conversation === current) scrollToEnd();
  announce("Answering");
  const saver = setInterval(() => save(conversation), SAVE_MS);
  let failure = null;
  try {
    const body = { ...(model && { model }), messages, ...conversation.sampling };
    for await (const chunk of streamChat(body, apiKey(), run.controller.signal)) {
      take(run, chunk);
      repaint(conversation, run);
    }
    message.state = "done";
  } catch (error) {
    message.state = error.name === "AbortError" ? "stopped" : "failed";
    if (message.state === "failed") failure = error;
  }
  clearInterval(saver);
  runs.delete(conversation.id);
  if (!message.content && !message.reasoning && message.state !== "done") {
    conversation.messages = conversation.messages.filter((m) => m !== message);
    if (failure) failures.set(conversation.id, { text: describe(failure), retry: true });
  } else if (failure) {
    message.error = describe(failure);
  }
  save(conversation);
  refresh(conversation);
  announce(failure ? "" : message.state === "done" ? "Answer finished" : "Stopped");
  if (failure instanceof ApiError) {
    if (failure.status === 0) connect();
    if (failure.status === 401) openSettings("api-key");
  }
}

const describe = (error) => (error instanceof ApiError ? error.message : `The page failed: ${error.message}`);

/** Shows a growing answer, at most once a frame and with at most a fifth of the time spent on it, however long it is. */
function repaint(conversation, run) {
  if (conversation !== current || run.painting) return;
  run.painting = true;
  const wait = Math.max(0, (run.paintedAt ?? 0) + 4 * (run.paintTook ?? 0) - performance.now());
  setTimeout(
    () =>
      requestAnimationFrame(() => {
        const start = performance.now();
        run.painting = false;
        if (conversation === current) views.get(run.message)?.update();
        run.paintedAt = performance.now();
        run.paintTook = run.paintedAt - start;
      }),
    wait,
  );
}

function refresh(conversation) {
  showList();
  if (conversation !== current) return;
  showMessages();
  showStatus();
}

const stop = (conversation) => runs.get(conversation.id)?.controller.abort();

function ask(text) {
  if (!conversations.has(current.id)) conversations.set(current.id, current);
  if (!current.title) {
    const line = text.split("\n")[0].trim();
    current.title = line.length > TITLE_LENGTH ? `${line.slice(0, TITLE_LENGTH - 1).trimEnd()}…` : line;
  }
  current.messages.push({ role: "user", content: text });
  answer(current);
}

/** Cuts the conversation before `message`, or after it with `keep`. */
function cut(message, keep) {
  current.messages.length = current.messages.indexOf(message) + (keep ? 1 : 0);
}

async function copy(text, button) {
  try {
    await copyText(text, button);
    announce("Copied");
  } catch (error) {
    fail(current, `Copying failed: ${error.message}.`, false);
  }
}

const messageActions = {
  copy: (message, button) => copy(message.content, button),
  regenerate(message) {
    if (runs.has(current.id)) return;
    cut(message, false);
    answer(current);
  },
  resend(message) {
    if (runs.has(current.id)) return;
    cut(message, true);
    answer(current);
  },
  edit(message, text) {
    if (runs.has(current.id)) return;
    cut(message, false);
    ask(text);
    focusInput();
  },
};

// ---- conversations

const conversationActions = {
  open: (id) => open(conversations.get(id)),
  rename(conversation, title) {
    document.activeElement?.blur();
    if (title !== conversation.title) {
      conversation.title = title;
      save(conversation);
    }
    showList();
    showStatus();
  },
  exportJson(conversation) {
    const blob = new Blob([JSON.stringify({ format: "m40llm-conversation-1", model, ...conversation }, null, 2)], { type: "application/json" });
    const link = document.createElement("a");
    link.href = URL.createObjectURL(blob);
    link.download = `${(conversation.title || "conversation").replace(/[^\p{L}\p{N}]+/gu, "-").slice(0, 60)}.json`;
    link.click();
    setTimeout(() => URL.revokeObjectURL(link.href), 10_000);
  },
  remove(conversation) {
    stop(conversation);
    conversations.delete(conversation.id);
    failures.delete(conversation.id);
    removeConversation(conversation.id);
    if (conversation === current) open(newConversation(conversation));
    else showList();
    toast(`Deleted “${conversation.title || "New chat"}”`, () => {
      conversations.set(conversation.id, conversation);
      save(conversation);
      open(conversation);
    });
  },
};

let toastTimer = 0;
function toast(text, undo) {
  clearTimeout(toastTimer);
  byId("toast-text").textContent = text;
  byId("toast-action").onclick = () => {
    byId("toast").hidden = true;
    undo();
  };
  byId("toast").hidden = false;
  toastTimer = setTimeout(() => (byId("toast").hidden = true), 8000);
}

// Another tab changed a conversation: take over what it wrote, unless an answer is running here.
addEventListener("storage", (event) => {
  const id = conversationOf(event.key);
  if (!id || runs.has(id)) return;
  const conversation = loadConversation(id);
  if (conversation) conversations.set(id, conversation);
  else conversations.delete(id);
  if (current.id === id && conversation) open(conversation);
  else showList();
});
addEventListener("pagehide", () => {
  for (const id of runs.keys()) save(conversations.get(id));
});

// ---- the server

let connecting = 0;
async function connect() {
  clearTimeout(connecting);
  const badge = byId("model");
  try {
    const list = await getJson("v1/models", apiKey());
    model = list.data?.[0]?.id ?? null;
    badge.dataset.state = "ready";
    byId("model-name").textContent = model ?? "no model";
    badge.title = model ?? "";
    byId("welcome-model").textContent = model ?? "the model";
    byId("input").placeholder = `Message ${model ?? "the model"}`;
    const context = list.data?.[0]?.meta?.n_ctx;
    byId("server-info").textContent = `${model} at ${location.host}${context ? `, ${context.toLocaleString("en")} tokens of context` : ""}.`;
    showDefaults((await getJson("props", apiKey())).default_generation_settings?.params ?? {});
  } catch (error) {
    badge.dataset.state = "down";
    byId("model-name").textContent = error.status === 401 ? "API key needed" : error.status === 503 ? "loading the model…" : "not connected";
    badge.title = byId("server-info").textContent = describe(error);
    if (error.status !== 401) connecting = setTimeout(connect, RETRY_MS);
  }
}

// ---- controls

const input = byId("input");
const touch = matchMedia("(pointer: coarse)");

/** Ready to type; not on a touch screen, where that would bring up the keyboard. */
function focusInput() {
  if (!touch.matches) input.focus();
}

byId("composer").addEventListener("submit", (event) => {
  event.preventDefault();
  const text = input.value.trim();
  if (!text || runs.has(current.id)) return;
  input.value = "";
  fitHeight(input);
  ask(text);
});
input.addEventListener("input", () => fitHeight(input));
input.addEventListener("keydown", (event) => {
  // An on-screen keyboard has no Shift+Enter, so there Enter makes a line and the button sends.
  if (event.key !== "Enter" || event.shiftKey || event.isComposing || touch.matches) return;
  event.preventDefault();
  byId("composer").requestSubmit();
});
byId("stop").addEventListener("click", () => {
  stop(current);
  focusInput();
});
addEventListener("keydown", (event) => {
  if (event.key !== "Escape" || byId("settings").open) return;
  if (byId("sidebar").classList.contains("open")) closeSidebar();
  else stop(current);
});

byId("new-chat").addEventListener("click", () => {
  open(newConversation(current));
  focusInput();
});
byId("error-close").addEventListener("click", () => {
  failures.delete(current.id);
  showStatus();
});
byId("error-retry").addEventListener("click", () => !runs.has(current.id) && answer(current));
byId("messages").addEventListener("click", (event) => {
  const button = event.target.closest(".copy-code");
  if (button) copy(button.closest(".code").querySelector("code").textContent, button);
});

const narrow = matchMedia("(max-width: 760px)");
function setSidebar(shown) {
  byId("sidebar").classList.toggle("open", shown);
  byId("sidebar").inert = narrow.matches && !shown;
  byId("main").inert = narrow.matches && shown;
  byId("scrim").hidden = !shown;
  byId("sidebar-open").setAttribute("aria-expanded", String(shown));
}
function closeSidebar() {
  const wasOpen = byId("sidebar").classList.contains("open");
  setSidebar(false);
  if (wasOpen) byId("sidebar-open").focus();
}
byId("sidebar-open").addEventListener("click", () => {
  setSidebar(true);
  byId("sidebar-close").focus();
});
byId("sidebar-close").addEventListener("click", closeSidebar);
byId("scrim").addEventListener("click", closeSidebar);
narrow.addEventListener("change", () => setSidebar(false));

byId("origin").textContent = location.host;
byId("suggestions").replaceChildren(...SUGGESTIONS.map((text) => suggestionView(text, () => ask(text))));
setUpSettings({ onChange: () => conversations.has(current.id) && save(current), onKey: connect });
setSidebar(false);
open(conversations.get(lastOpen()) ?? newConversation());
if (damaged) fail(current, `${damaged} stored conversation${damaged > 1 ? "s" : ""} could not be read; they are left as they are.`, false);
connect();
focusInput();
