// The frame of the page: views, keys, the list of models, and the state of the server.
import { request, useKeys } from "./api.js";
import * as chat from "./chat.js";
import * as engine from "./engine.js";

const by = (id) => document.getElementById(id);
const STATE_MS = 5000;

function show(name) {
  for (const view of ["chat", "engine"]) {
    by(view).hidden = view !== name;
    by(`show-${view}`).setAttribute("aria-pressed", String(view === name));
  }
  if (name === "engine" && !document.hidden) engine.show(askKey);
  else engine.hide();
}

function askKey() {
  if (by("key-dialog").open) return;
  by("key-dialog").returnValue = ""; // Escape leaves it as it is
  by("key-dialog").showModal();
}

async function models() {
  try {
    const { data } = await (await request("v1/models")).json();
    const names = data.filter((card) => (card.tasks ?? ["generate"]).includes("generate")).map((card) => card.id);
    by("model").replaceChildren(...names.map((name) => new Option(name, name)));
    state("ready");
    return true;
  } catch (error) {
    state(error.message || "the server does not answer");
    if (error.status === 401) { askKey(); return true; }
    return false;
  }
}

function state(text) { if (by("state").textContent !== text) by("state").textContent = text; }

async function untilModels() {
  while (!await models()) await new Promise((resume) => setTimeout(resume, STATE_MS));
}

by("show-chat").addEventListener("click", () => show("chat"));
by("show-engine").addEventListener("click", () => show("engine"));
by("open-key").addEventListener("click", askKey);
by("key-dialog").addEventListener("close", () => {
  if (by("key-dialog").returnValue !== "use") return;
  useKeys(by("key").value.trim(), by("admin-key").value.trim());
  by("key").value = by("admin-key").value = "";
  untilModels();
  if (!by("engine").hidden) { engine.hide(); engine.show(askKey); }
});
document.addEventListener("visibilitychange", () => {
  if (by("engine").hidden) return;
  if (document.hidden) engine.hide();
  else engine.show(askKey);
});
chat.start(askKey);
untilModels();
