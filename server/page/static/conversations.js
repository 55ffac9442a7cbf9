// Conversations, kept in this browser: at most 100 of them and 4 MB, the oldest go first.
const PLACE = "troupe.conversations", MOST = 100, MOST_LETTERS = 4_000_000;

let all = read(), kept = true;

function read() {
  try { return checked(JSON.parse(localStorage.getItem(PLACE) || "[]")); } catch { return []; }
}

// Only what this page writes is taken from a file or the browser's store.
export function checked(given) {
  if (!Array.isArray(given)) return [];
  return given.filter((one) => one && Array.isArray(one.messages)).slice(0, MOST).map((one) => ({
    id: String(one.id || name()), title: String(one.title || "Chat").slice(0, 200),
    messages: one.messages.filter((message) => message && ["user", "assistant"].includes(message.role)).map((message) => ({
      role: message.role, content: String(message.content ?? ""), reasoning: String(message.reasoning ?? ""),
      note: String(message.note ?? ""),
    })),
  }));
}

export function list(search = "") {
  const wanted = search.trim().toLowerCase();
  if (!wanted) return all;
  return all.filter((one) => one.messages.some((message) => message.content.toLowerCase().includes(wanted)));
}

// `crypto.randomUUID` is missing where the page comes over plain HTTP from another machine.
function name() {
  return [...crypto.getRandomValues(new Uint32Array(4))].map((part) => part.toString(16).padStart(8, "0")).join("");
}

export function create() {
  return { id: name(), title: "New chat", messages: [] };
}

export function save(conversation) {
  const first = conversation.messages.find((message) => message.role === "user");
  conversation.title = (first?.content || "New chat").trim().slice(0, 60) || "New chat";
  all = [conversation, ...latest().filter((one) => one.id !== conversation.id)].slice(0, MOST);
  store();
}

export function remove(id) { all = latest().filter((one) => one.id !== id); store(); }

export function add(given) {
  all = latest();
  const known = new Set(all.map((one) => one.id));
  all = [...checked(given).filter((one) => !known.has(one.id)), ...all].slice(0, MOST);
  store();
}

// Another tab may have stored some meanwhile.
function latest() { return kept ? read() : all; }

function store() {
  while (all.length > 1 && JSON.stringify(all).length > MOST_LETTERS) all.pop();
  try { localStorage.setItem(PLACE, JSON.stringify(all)); } catch { kept = false; /* private windows store nothing */ }
}
