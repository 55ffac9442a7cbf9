// The chat: one conversation at a time over the server's own API.
import { events, request } from "./api.js";
import * as conversations from "./conversations.js";
import { element, render } from "./markdown.js";

const RENDER_MS = 80, MOST_LIVE = 20_000;
const by = (id) => document.getElementById(id);
const settings = ["temperature", "top_p", "top_k", "max_tokens", "seed"];
let current = conversations.create(), running = null, askKey = () => {};

export function start(onKeyNeeded) {
  askKey = onKeyNeeded;
  by("ask").addEventListener("submit", (event) => { event.preventDefault(); send(); });
  by("text").addEventListener("keydown", (event) => {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) { event.preventDefault(); send(); }
  });
  by("stop").addEventListener("click", () => running?.abort());
  by("new").addEventListener("click", fresh);
  by("search").addEventListener("input", showList);
  by("export").addEventListener("click", exportAll);
  by("import").addEventListener("change", importFile);
  by("delete").addEventListener("click", () => { current.removed = true; conversations.remove(current.id); fresh(); });
  document.addEventListener("keydown", (event) => {
    const command = event.ctrlKey || event.metaKey;
    if (command && event.key.toLowerCase() === "k") { event.preventDefault(); by("search").focus(); }
    if (command && event.shiftKey && event.key.toLowerCase() === "o") { event.preventDefault(); fresh(); }
  });
  showList();
}

function fresh() {
  running?.abort();
  open(conversations.create());
  by("text").focus();
}

function open(conversation) {
  current = conversation;
  by("messages").replaceChildren(...conversation.messages.map(show));
  showList();
}

function showList() {
  by("conversations").replaceChildren(...conversations.list(by("search").value).map((one) => {
    const item = element("li"), button = element("button", one.title);
    button.type = "button";
    if (one.id === current.id) button.setAttribute("aria-current", "true");
    button.addEventListener("click", () => { running?.abort(); open(one); });
    item.append(button);
    return item;
  }));
}

function show(message) {
  const made = element("article", undefined, `message ${message.role}`), body = element("div", undefined, "body");
  made.append(element("h2", message.role === "user" ? "You" : "Model"));
  if (message.role === "assistant") {
    const thought = thoughtOf(message.reasoning);
    made.append(thought);
    body.append(render(message.content));
  } else body.textContent = message.content;
  const below = element("p", undefined, "below");
  below.append(element("span", message.note || ""));
  below.append(message.role === "user" ? action("Edit", () => edit(message)) : action("Again", () => again(message)));
  below.append(action("Copy", () => navigator.clipboard?.writeText(message.content).catch(() => {})));
  made.append(body, below);
  return made;
}

function thoughtOf(text) {
  const made = element("details", undefined, "thought");
  made.hidden = !text;
  made.append(element("summary", "Thinking"), element("pre", text));
  return made;
}

function action(name, work) {
  const made = element("button", name);
  made.type = "button";
  made.addEventListener("click", work);
  return made;
}

function edit(message) {
  if (running) return;
  by("text").value = message.content;
  current.messages = current.messages.slice(0, current.messages.indexOf(message));
  open(current);
  by("text").focus();
}

function again(message) {
  if (running) return;
  const at = current.messages.indexOf(message); // -1: it has failed, and is no part of the conversation
  if (at >= 0) current.messages = current.messages.slice(0, at);
  open(current);
  answer();
}

function send() {
  const text = by("text").value;
  if (running || !text.trim()) return;
  by("text").value = "";
  const message = { role: "user", content: text, reasoning: "", note: "" };
  current.messages.push(message);
  by("messages").append(show(message));
  answer();
}

function bodyOf() {
  const system = by("system").value.trim(), schema = by("schema").value.trim();
  const past = current.messages.map(({ role, content }) => ({ role, content }));
  const body = {
    model: by("model").value || undefined, stream: true, stream_options: { include_usage: true },
    messages: system ? [{ role: "system", content: system }, ...past] : past,
  };
  for (const name of settings) if (by(name).value !== "") body[name] = Number(by(name).value);
  if (schema) body.response_format = { type: "json_schema", json_schema: { name: "answer", schema: JSON.parse(schema) } };
  return body;
}

async function answer() {
  const conversation = current, message = { role: "assistant", content: "", reasoning: "", note: "" };
  const shown = show(message), box = by("messages");
  let failure = null;
  box.append(shown);
  running = new AbortController();
  by("stop").hidden = false;
  by("send").disabled = true;
  try {
    const began = performance.now(), stream = await request("v1/chat/completions", { body: bodyOf(), signal: running.signal });
    await read(stream, began, message, shown);
  } catch (error) {
    if (error.name === "AbortError") message.note ||= "stopped";
    else failure = error;
  }
  finish(shown, message, conversation, failure);
}

async function read(stream, began, message, shown) {
  let first = 0, usage = null, reason = "";
  const draw = drawer(shown, message);
  for await (const chunk of events(stream)) {
    if (chunk.error) throw new Error(chunk.error.message);
    if (chunk.usage) usage = chunk.usage;
    const choice = chunk.choices?.[0];
    if (!choice) continue;
    message.reasoning += choice.delta.reasoning ?? choice.delta.reasoning_content ?? "";
    message.content += choice.delta.content ?? "";
    for (const call of choice.delta.tool_calls ?? []) message.content += (call.function.name ?? "") + (call.function.arguments ?? "");
    if (!first && (message.content || message.reasoning)) first = performance.now();
    reason = choice.finish_reason ?? reason;
    draw();
  }
  message.note = noteOf(usage, reason, first ? first - began : performance.now() - began, first ? performance.now() - first : 0);
}

function noteOf(usage, reason, wait, seconds) {
  if (!usage) return reason;
  const tokens = usage.completion_tokens, cached = usage.prompt_tokens_details?.cached_tokens ?? 0;
  const speed = tokens > 1 && seconds > 0 ? ` · ${((tokens - 1) / seconds * 1000).toFixed(1)} tokens/s` : "";
  const end = reason === "length" ? " · ended at the limit" : "";
  return `${tokens} tokens · first after ${Math.round(wait)} ms${speed} · context ${usage.total_tokens} (${cached} cached)${end}`;
}

// While text streams in, it is drawn a few times a second, and as plain text where it is long.
function drawer(shown, message) {
  const body = shown.querySelector(".body"), thought = shown.querySelector(".thought"), box = by("messages");
  let last = 0, due = 0;
  const draw = () => {
    due = 0; last = performance.now();
    const below = box.scrollHeight - box.scrollTop - box.clientHeight < 80;
    if (message.content.length > MOST_LIVE) body.textContent = message.content;
    else body.replaceChildren(render(message.content));
    thought.hidden = !message.reasoning;
    thought.querySelector("pre").textContent = message.reasoning;
    if (below) box.scrollTop = box.scrollHeight;
  };
  return () => { due ||= setTimeout(draw, Math.max(0, RENDER_MS - (performance.now() - last))); };
}

function fail(shown, error) {
  const note = element("p", error.message || "The server does not answer.", "error");
  note.setAttribute("role", "alert");
  shown.append(note);
  if (error.status === 401) askKey();
}

function finish(shown, message, conversation, failure) {
  const last = show(message);
  running = null;
  by("stop").hidden = true;
  by("send").disabled = false;
  if ((message.content || message.reasoning) && !conversation.removed) {
    conversation.messages.push(message);
    conversations.save(conversation);
    showList();
  }
  shown.replaceWith(last);
  if (failure) fail(last, failure);
  const box = by("messages");
  box.scrollTop = box.scrollHeight;
}

function exportAll() {
  const link = element("a"), address = URL.createObjectURL(new Blob([JSON.stringify(conversations.list())], { type: "application/json" }));
  link.href = address;
  link.download = "troupe-chats.json";
  link.click();
  setTimeout(() => URL.revokeObjectURL(address), 1000);
}

async function importFile(event) {
  const [file] = event.target.files;
  if (!file || file.size > 8_000_000) return;
  try { conversations.add(JSON.parse(await file.text())); } catch { /* not a file of chats */ }
  showList();
}
