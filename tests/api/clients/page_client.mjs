// The page in a real browser. Arguments: folder of modules, browser, URL, folder for pictures, file with outputs, key.
// Prints what it saw as JSON.
import { readFileSync } from "node:fs";
import { createRequire } from "node:module";
import { pathToFileURL } from "node:url";

const [folder, executablePath, url, pictures, file, key = ""] = process.argv.slice(2);
const require = createRequire(pathToFileURL(folder + "/"));
const { chromium } = require("playwright-core");
const axe = readFileSync(require.resolve("axe-core/axe.min.js"), "utf8");
const outputs = JSON.parse(readFileSync(file, "utf8"));
const browser = await chromium.launch({ executablePath, args: ["--no-sandbox", "--disable-gpu"] });
const seen = { violations: [], problems: [], foreign: [], dialogs: 0, widths: {}, hits: [], slow: [] };

async function open(options) {
  const context = await browser.newContext({ viewport: { width: 1100, height: 800 }, reducedMotion: "reduce", ...options });
  const page = await context.newPage();
  await page.addInitScript(() => {
    delete Crypto.prototype.randomUUID; // as where the page comes over plain HTTP from another machine
    window.__refused = [];
    document.addEventListener("securitypolicyviolation", (event) => window.__refused.push(`${event.violatedDirective} ${event.blockedURI}`));
  });
  page.on("pageerror", (error) => seen.problems.push(String(error)));
  page.on("dialog", (dialog) => { seen.dialogs++; dialog.dismiss(); });
  page.on("request", (request) => { if (!request.url().startsWith(url) && !request.url().startsWith("data:")) seen.foreign.push(request.url().slice(0, 200)); });
  await page.goto(url);
  return page;
}

async function check(page, name) {
  await page.evaluate(axe);
  const { violations } = await page.evaluate(() => axe.run());
  for (const one of violations) seen.violations.push(`${name}: ${one.id}: ${one.nodes.map((node) => node.html.slice(0, 120)).join(" | ")}`);
}

const finished = (page) => page.waitForFunction(() => !document.getElementById("send").disabled, undefined, { timeout: 30_000 });

async function ask(page, text) {
  await page.fill("#text", text);
  await page.click("#send");
  await finished(page);
}

async function giveKey(page) {
  await page.waitForSelector("#key-dialog[open]");
  await page.fill("#key", key);
  await page.click("#key-dialog button[value=use]");
}

// The first answer: one click, and two more for the key where the server wants one.
const began = Date.now();
const page = await open({ colorScheme: "light" });
if (key) await giveKey(page);
await page.waitForFunction(() => document.getElementById("model").options.length > 0, undefined, { timeout: 60_000 });
await ask(page, "What is 23 + 45?");
seen.seconds = (Date.now() - began) / 1000;
seen.first = await page.textContent(".message.assistant .body");
seen.note = await page.textContent(".message.assistant .below span");
await check(page, "chat");
await page.screenshot({ path: `${pictures}/chat-light.png` });

// Keys of the keyboard, editing, and what a reload keeps.
await page.keyboard.press("Control+Shift+O");
seen.fresh = await page.locator(".message").count();
await page.keyboard.press("Control+k");
seen.searching = await page.evaluate(() => document.activeElement.id);
seen.kept = await page.locator("#conversations button").count();
await page.locator("#conversations button").first().click();
seen.reopened = await page.textContent(".message.assistant .body");

// Keys stay when the dialog is left with Escape, or with empty fields.
for (const leave of [() => page.keyboard.press("Escape"), () => page.click("#key-dialog button[value=use]")]) {
  await page.click("#open-key");
  await page.waitForSelector("#key-dialog[open]");
  await leave();
  await page.waitForSelector("#key-dialog:not([open])", { state: "attached" });
}

// The engine's view.
await page.click("#show-engine");
await page.waitForFunction(() => document.querySelectorAll("#actors li").length > 0, undefined, { timeout: 20_000 });
seen.actors = await page.locator("#actors strong").allTextContents();
seen.numbers = await page.locator("#numbers dt").allTextContents();
await check(page, "engine");
await page.screenshot({ path: `${pictures}/engine-light.png`, fullPage: true });
await page.click("#show-chat");

// An answer that fails keeps its text and shows why; `Again` sends the question again.
const asked = [], failing = [
  { status: 200, contentType: "text/event-stream", body: 'data: {"choices":[{"index":0,"delta":{"content":"A part"}}]}\n\ndata: {"error":{"message":"it has failed"}}\n\ndata: [DONE]\n\n' },
  { status: 503, contentType: "application/json", body: '{"error":{"message":"it is full"}}' },
  { status: 200, contentType: "text/event-stream", body: 'data: {"choices":[{"index":0,"delta":{"content":"At last"}}]}\n\ndata: [DONE]\n\n' },
];
await page.route("**/v1/chat/completions", (route) => {
  asked.push(route.request().postDataJSON().messages);
  route.fulfill(failing[Math.min(asked.length, failing.length) - 1]);
});
const last = (part) => page.locator(`.message.assistant ${part}`).last().textContent();
await page.keyboard.press("Control+Shift+O");
await ask(page, "First");
seen.failed = [await last(".body"), await last(".error")];
await page.keyboard.press("Control+Shift+O");
await ask(page, "Second");
seen.refusal = await last(".error");
await page.locator(".message.assistant button", { hasText: "Again" }).last().click();
await finished(page);
seen.again = [await last(".body"), asked[2]];
await page.unroute("**/v1/chat/completions");

// What a model may write: the server's answer is replaced, the page is as it is.
let output = "";
await page.route("**/v1/chat/completions", (route) => {
  const chunk = { choices: [{ index: 0, delta: { content: output, reasoning: output.slice(0, 2000) }, finish_reason: "stop" }] };
  route.fulfill({ status: 200, contentType: "text/event-stream", body: `data: ${JSON.stringify(chunk)}\n\ndata: [DONE]\n\n` });
});
for (output of outputs) {
  await page.keyboard.press("Control+Shift+O");
  const start = Date.now();
  await ask(page, "Go on.");
  await page.evaluate(() => new Promise((resume) => requestAnimationFrame(() => setTimeout(resume))));
  const [hit, text, tags] = await page.evaluate(() => {
    const body = document.querySelector(".message.assistant .body");
    const names = new Set([...body.querySelectorAll("*")].map((one) => one.tagName.toLowerCase()));
    return [window.__hit ?? null, body.textContent.length, [...names]];
  });
  const odd = tags.filter((tag) => !["p", "strong", "em", "code", "pre", "div", "button", "a", "ul", "ol", "li", "blockquote"].includes(tag));
  const links = await page.evaluate(() => [...document.querySelectorAll(".body a")].map((one) => one.protocol + one.rel));
  if (hit !== null || odd.length || links.some((link) => !/^(https?|mailto):noopener/.test(link))) seen.hits.push([output.slice(0, 80), hit, odd, links]);
  if (!text) seen.hits.push([output.slice(0, 80), "nothing is shown"]);
  if (Date.now() - start > 4000) seen.slow.push([output.slice(0, 20), Date.now() - start]);
}
await page.unroute("**/v1/chat/completions");
seen.outputs = outputs.length;
seen.refused = await page.evaluate(() => window.__refused);

// Dark, and as narrow as a phone.
for (const [name, options] of [["dark", { colorScheme: "dark" }], ["phone", { viewport: { width: 360, height: 740 } }]]) {
  const other = await open(options);
  if (key) await giveKey(other);
  await other.waitForFunction(() => document.getElementById("model").options.length > 0);
  await ask(other, "What is 23 + 45?");
  await check(other, `chat ${name}`);
  await other.screenshot({ path: `${pictures}/chat-${name}.png` });
  seen.widths[`chat ${name}`] = await other.evaluate(() => document.documentElement.scrollWidth - document.documentElement.clientWidth);
  await other.click("#show-engine");
  await other.waitForFunction(() => document.querySelectorAll("#actors li").length > 0);
  await check(other, `engine ${name}`);
  await other.screenshot({ path: `${pictures}/engine-${name}.png` });
  seen.widths[`engine ${name}`] = await other.evaluate(() => document.documentElement.scrollWidth - document.documentElement.clientWidth);
  await other.context().close();
}
await browser.close();
console.log(JSON.stringify(seen));
