// openai-node as its users call it. Arguments: folder of its modules, URL of the API, model. Prints what it saw as JSON.
import { createRequire } from "node:module";
import { pathToFileURL } from "node:url";

const [folder, baseURL, model] = process.argv.slice(2);
const require = createRequire(pathToFileURL(folder + "/"));
const { default: OpenAI } = await import(pathToFileURL(require.resolve("openai")));
const client = new OpenAI({ baseURL, apiKey: "none", maxRetries: 0 });
const messages = [{ role: "user", content: "What is 23 + 45?" }];
const common = { model, messages, max_tokens: 24, temperature: 0 };

const whole = await client.chat.completions.create({ ...common, logprobs: true, top_logprobs: 2 });
let streamed = "", usage = null;
for await (const chunk of await client.chat.completions.create({ ...common, stream: true, stream_options: { include_usage: true } })) {
  streamed += chunk.choices[0]?.delta?.content ?? "";
  usage = chunk.usage ?? usage;
}
const helper = await client.chat.completions.stream(common).finalChatCompletion();
const properties = { first: { type: "integer" }, second: { type: "integer" } };
const schema = { type: "object", properties, required: ["first", "second"], additionalProperties: false };
const shaped = {
  ...common, max_tokens: 96, response_format: { type: "json_schema", json_schema: { name: "sum", schema, strict: true } },
};
const structured = await client.chat.completions.create(shaped);
const structuredStreamed = await client.chat.completions.stream(shaped).finalChatCompletion();
const calling = {
  ...common, max_tokens: 96, tools: [{ type: "function", function: { name: "add", parameters: schema } }],
  tool_choice: { type: "function", function: { name: "add" } },
};
const forced = await client.chat.completions.create(calling);
const forcedHelper = await client.chat.completions.stream(calling).finalChatCompletion();
const said = [];
for await (const chunk of await client.chat.completions.create({ ...calling, stream: true }))
  for (const piece of chunk.choices[0]?.delta?.tool_calls ?? []) {
    said[piece.index] ??= ["", ""];
    said[piece.index][0] += piece.function?.name ?? "";
    said[piece.index][1] += piece.function?.arguments ?? "";
  }
const callsOf = (completion) => completion.choices[0].message.tool_calls.map((call) => [call.function.name, call.function.arguments]);
const texts = ["a fox", "x"];
const coded = await client.embeddings.create({ model, input: texts });
const floats = await client.embeddings.create({ model, input: texts, encoding_format: "float" });
const text = await client.completions.create({ model, prompt: "Once upon", max_tokens: 8, temperature: 0 });
let textStreamed = "";
for await (const chunk of await client.completions.create({ model, prompt: "Once upon", max_tokens: 8, temperature: 0, stream: true }))
  textStreamed += chunk.choices[0]?.text ?? "";
const models = [];
for await (const card of client.models.list()) models.push(card.id);
const response = await client.responses.create({ model, input: "What is 23 + 45?", max_output_tokens: 24, temperature: 0 });
const telling = { model, input: "Tell me a story.", max_output_tokens: 8, temperature: 0 };
const told = await client.responses.create(telling);
const events = [];
for await (const event of await client.responses.create({ ...telling, stream: true })) events.push(event);
const toldHelper = await client.responses.stream(telling).finalResponse();
const callEvents = [];
for await (const event of await client.responses.create({
  model, input: "What is 23 + 45?", max_output_tokens: 96, temperature: 0, stream: true,
  tools: [{ type: "function", name: "add", parameters: schema, strict: true }], tool_choice: { type: "function", name: "add" },
})) callEvents.push(event);
let refused = null;
try { await client.chat.completions.create({ ...common, model: "nobody" }); } catch (error) {
  refused = [error.constructor.name, error.status, error.code, error.param];
}
let wrong = null;
try { await client.chat.completions.create({ ...common, temperature: 9 }); } catch (error) {
  wrong = [error.constructor.name, error.status, error.param];
}
const abort = new AbortController();
let aborted = 0;
try {
  for await (const _ of await client.chat.completions.create({ ...common, max_tokens: 500, stream: true }, { signal: abort.signal })) {
    if (++aborted === 2) abort.abort();
  }
} catch (error) { if (error.name !== "APIUserAbortError" && error.name !== "AbortError" && error.constructor.name !== "APIUserAbortError") throw error; }

console.log(JSON.stringify({
  whole: whole.choices[0].message.content, logprobs: whole.choices[0].logprobs.content.length, usage: whole.usage.completion_tokens,
  streamed, streamedUsage: usage.completion_tokens, helper: helper.choices[0].message.content,
  structured: Object.keys(JSON.parse(structured.choices[0].message.content)).sort(),
  calls: forced.choices[0].message.tool_calls.map((call) => [call.function.name, Object.keys(JSON.parse(call.function.arguments)).sort()]),
  structuredText: structured.choices[0].message.content, structuredStreamed: structuredStreamed.choices[0].message.content,
  saidWhole: callsOf(forced), saidHelper: callsOf(forcedHelper), said,
  coded: coded.data.map((item) => Array.from(item.embedding)), floats: floats.data.map((item) => item.embedding),
  text: text.choices[0].text, textStreamed, models, response: response.output_text, refused, wrong,
  told: told.output_text, toldHelper: toldHelper.output.at(-1).content[0].text, events, callEvents,
}));
