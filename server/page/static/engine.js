// The engine's view: frames are read only while it is shown.
import { events, request } from "./api.js";
import { drawBlocks, drawSteps } from "./drawing.js";
import { element } from "./markdown.js";

const by = (id) => document.getElementById(id);
const RETRY_MS = 2000;
let watching = null, before = null, speed = 0;

export function show(onKeyNeeded) {
  if (!watching) watch((watching = new AbortController()).signal, onKeyNeeded);
}

export function hide() { watching?.abort(); watching = null; before = null; }

async function watch(signal, onKeyNeeded) {
  while (!signal.aborted) {
    try {
      for await (const view of events(await request("debug/events", { signal, admin: true }))) {
        if (signal.aborted) return;
        if (view.error) throw new Error(view.error.message);
        draw(view);
      }
      notice("The server has ended the view.");
    } catch (error) {
      if (signal.aborted) return;
      if (error.status === 401) { notice("This view needs the server's admin key."); onKeyNeeded(); hide(); return; }
      if (error.status === 404) { notice("The server shows this view on a loopback address, or with an admin key."); return; }
      notice(error.message);
    }
    await new Promise((resume) => setTimeout(resume, RETRY_MS));
  }
}

// A live region is only touched where its text changes.
function notice(text) { if (by("notice").textContent !== text) by("notice").textContent = text; }

function draw(view) {
  notice(view.notice);
  if (before && view.uptime_ms > before.uptime_ms) {
    speed = 0.7 * speed + 0.3 * (view.tokens_generated - before.tokens_generated) / (view.uptime_ms - before.uptime_ms) * 1000;
  }
  before = view;
  const used = view.blocks_total - view.blocks_free - view.blocks_cached;
  const hits = view.prefix_queries ? `${Math.round(100 * view.prefix_hits / view.prefix_queries)} %` : "–";
  numbers({
    "Tokens per second": speed.toFixed(1), Running: view.running, Waiting: view.waiting, Paused: view.paused,
    "KV blocks in use": `${used} of ${view.blocks_total}`, "Found in the prefix cache": hits, Preemptions: view.preemptions,
    Steps: view.steps, "Open requests": view.open_requests,
  });
  const { requests, reasons, hidden, keys, cells } = view.scheduler;
  drawRequests(requests, reasons, keys);
  by("hidden").textContent = hidden ? `${hidden} more requests are not shown.` : "";
  drawActors(view.actors);
  drawBlocks(by("blocks"), cells);
  by("blocks").setAttribute("aria-label", `Map of KV blocks: ${used} in use, ${view.blocks_cached} cached, ${view.blocks_free} free`);
  drawSteps(by("steps"), view.recent);
  by("steps").setAttribute("aria-label", `Strip of the last ${view.recent.length} steps`);
  drawShares(keys);
}

function numbers(given) {
  const box = by("numbers");
  Object.entries(given).forEach(([name, value], at) => {
    let pair = box.children[at];
    if (!pair) { pair = element("div"); pair.append(element("dt", name), element("dd")); box.append(pair); }
    if (pair.lastChild.textContent !== String(value)) pair.lastChild.textContent = value;
  });
}

const nameOf = (name) => name || "no key";

function drawRequests(requests, reasons, keys) {
  const body = by("requests").tBodies[0];
  while (body.rows.length > requests.length) body.deleteRow(-1);
  requests.forEach(([number, state, why, key, prompt, computed, generated, blocks, age, first], at) => {
    const row = body.rows[at] ?? body.insertRow();
    const texts = [
      `#${number}`, state, reasons[why] || "–", key < 0 ? "–" : nameOf(keys[key]?.[0]), prompt, computed, generated, blocks,
      `${(age / 1000).toFixed(1)} s`, first === null ? "–" : `${first} ms`,
    ];
    texts.forEach((text, place) => {
      const cell = row.cells[place] ?? row.insertCell();
      if (cell.textContent !== String(text)) cell.textContent = text;
    });
  });
}

function bar(label, value, most) {
  const meter = element("meter");
  meter.max = most || 1;
  meter.value = Math.min(value, most);
  meter.setAttribute("aria-label", label);
  return meter;
}

function drawActors(actors) {
  by("actors").replaceChildren(...actors.map(([name, restarts, depth, capacity, messages, dropped]) => {
    const item = element("li", undefined, depth >= capacity ? "full" : "");
    item.append(element("strong", name), bar(`Mailbox of ${name}`, depth, capacity));
    const more = [`${depth} of ${capacity}`, `${messages} messages`];
    if (dropped) more.push(`${dropped} dropped`);
    if (restarts) more.push(`${restarts} restarts`);
    item.append(element("div", more.join(" · ")));
    return item;
  }));
}

function drawShares(keys) {
  const most = Math.max(1, ...keys.map((key) => key[3]));
  by("shares").replaceChildren(...keys.map(([name, running, waiting, served]) => {
    const item = element("li");
    item.append(element("strong", nameOf(name)), bar(`Share of ${nameOf(name)}`, served, most));
    item.append(element("div", `${Math.round(served)} tokens by share · ${running} running · ${waiting} waiting`));
    return item;
  }));
}
