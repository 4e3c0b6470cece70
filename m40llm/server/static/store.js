// Conversations in localStorage, one entry each, so that saving one does not rewrite the others.

const PREFIX = "m40llm.conversation.";
const API_KEY = "m40llm.api-key";
const LAST = "m40llm.last";

export const SAMPLING = [
  { name: "temperature", label: "Temperature", min: 0, max: 100, step: 0.1, note: "0 always takes the likeliest token" },
  { name: "top_p", label: "Top-p", min: 0, max: 1, step: 0.05, note: "1 is off" },
  { name: "top_k", label: "Top-k", min: 0, step: 1, whole: true, note: "0 is off" },
  { name: "min_p", label: "Min-p", min: 0, max: 1, step: 0.01, note: "0 is off" },
  { name: "max_tokens", label: "Max tokens", min: 1, step: 1, whole: true, note: "of one answer" },
  { name: "seed", label: "Seed", min: 0, max: Number.MAX_SAFE_INTEGER, step: 1, whole: true, note: "same seed, same answer" },
];

/** A new conversation with the settings of `like`, if given. */
export function newConversation(like = null) {
  const now = Date.now();
  return {
    id: `${now.toString(36)}-${crypto.getRandomValues(new Uint32Array(1))[0].toString(36)}`,
    title: "",
    created: now,
    updated: now,
    system: like?.system ?? "",
    sampling: { ...like?.sampling },
    messages: [],
  };
}

/** `value` with every field of the right type, or null if it is no conversation. Other software may have written it. */
function checked(value) {
  if (typeof value !== "object" || value === null || typeof value.id !== "string" || !Array.isArray(value.messages)) return null;
  const text = (x) => (typeof x === "string" ? x : "");
  const time = (x) => (Number.isFinite(x) ? x : 0);
  const messages = value.messages
    .filter((m) => m && (m.role === "user" || m.role === "assistant") && typeof m.content === "string")
    .map((m) => ({
      role: m.role,
      content: m.content,
      ...(m.role === "assistant" && {
        reasoning: text(m.reasoning),
        // A page that was closed while an answer ran could not write how it ended.
        state: ["done", "stopped", "failed"].includes(m.state) ? m.state : "stopped",
        stats: typeof m.stats === "object" ? m.stats : null,
        error: text(m.error),
      }),
    }));
  const sampling = {};
  for (const { name } of SAMPLING) if (Number.isFinite(value.sampling?.[name])) sampling[name] = value.sampling[name];
  return {
    id: value.id,
    title: text(value.title),
    created: time(value.created),
    updated: time(value.updated),
    system: text(value.system),
    sampling,
    messages,
  };
}

function parsed(text) {
  try {
    return checked(JSON.parse(text));
  } catch {
    return null;
  }
}

/** All stored conversations by id, and how many entries could not be read (they are left as they are). */
export function loadConversations() {
  const conversations = new Map();
  let damaged = 0;
  for (const key of Object.keys(localStorage).filter((k) => k.startsWith(PREFIX))) {
    const conversation = parsed(localStorage.getItem(key));
    if (conversation && PREFIX + conversation.id === key) conversations.set(conversation.id, conversation);
    else damaged += 1;
  }
  return { conversations, damaged };
}

export function loadConversation(id) {
  const text = localStorage.getItem(PREFIX + id);
  return text === null ? null : parsed(text);
}

/** The id of a conversation that a storage event is about, or null. */
export const conversationOf = (key) => (key?.startsWith(PREFIX) ? key.slice(PREFIX.length) : null);

/** Throws what the browser throws when its storage is full or switched off. */
export function saveConversation(conversation) {
  localStorage.setItem(PREFIX + conversation.id, JSON.stringify(conversation));
}

export const removeConversation = (id) => localStorage.removeItem(PREFIX + id);

// Which conversation is open belongs to the tab: two tabs may show two.
export const lastOpen = () => sessionStorage.getItem(LAST) ?? localStorage.getItem(LAST);
export function setLastOpen(id) {
  sessionStorage.setItem(LAST, id);
  localStorage.setItem(LAST, id);
}

export const storedKey = () => localStorage.getItem(API_KEY) ?? "";
export function storeKey(key) {
  if (key) localStorage.setItem(API_KEY, key);
  else localStorage.removeItem(API_KEY);
}
