// ollama of npm as its users call it. Arguments: folder of its modules, URL of the server, model. Prints what it saw.
import { createRequire } from "node:module";
import { pathToFileURL } from "node:url";

const [folder, host, model] = process.argv.slice(2);
const require = createRequire(pathToFileURL(folder + "/"));
const { Ollama } = await import(pathToFileURL(require.resolve("ollama")));
const client = new Ollama({ host });
const messages = [{ role: "user", content: "What is 23 + 45?" }];
const weather = [{ role: "user", content: "What is the weather in Paris?" }];
const options = { temperature: 0, num_predict: 96 };
const properties = { first: { type: "integer" }, second: { type: "integer" } };
const format = { type: "object", properties, required: ["first", "second"], additionalProperties: false };
const parameters = { type: "object", properties: { city: { type: "string" } }, required: ["city"] };
const tools = [{ type: "function", function: { name: "get_weather", description: "Get the weather in a city", parameters } }];

const whole = await client.chat({ model, messages, options });
let streamed = "", last = null;
for await (const part of await client.chat({ model, messages, options, stream: true })) {
  streamed += part.message.content;
  last = part;
}
const told = await client.generate({ model, prompt: messages[0].content, options });
const formed = await client.chat({ model, messages, options, format });
const called = await client.chat({ model, messages: weather, options, tools });
const call = called.message.tool_calls[0].function;
const result = { role: "tool", tool_name: call.name, content: "It is sunny in Paris." };
const answered = await client.chat({ model, messages: [...weather, called.message, result], options, tools });
const refused = [];
for (const [name, given] of [["nobody", options], [model, { temperature: 9 }]]) {
  try { await client.chat({ model: name, messages, options: given }); } catch (error) { refused.push([error.status_code, error.error]); }
}
let pieces = 0, aborted = null;
const endless = await client.chat({ model, messages, options: { num_predict: 2000, ignore_eos: true }, stream: true });
try { for await (const _ of endless) if (++pieces === 2) endless.abort(); } catch (error) { aborted = error.name; }
const shown = await client.show({ model });

console.log(JSON.stringify({
  whole: whole.message.content, streamed, done: last.done,
  counts: [whole.prompt_eval_count, whole.eval_count, last.prompt_eval_count, last.eval_count],
  told: told.response, formed: Object.keys(JSON.parse(formed.message.content)).sort(),
  call: [call.name, call.arguments], answered: answered.message.content, refused, aborted,
  models: (await client.list()).models.map((one) => one.model), running: (await client.ps()).models.map((one) => one.model),
  capabilities: shown.capabilities, context: shown.model_info[`${shown.model_info["general.architecture"]}.context_length`],
  vectors: (await client.embed({ model, input: ["a fox", "x"] })).embeddings,
  older: (await client.embeddings({ model, prompt: "a fox" })).embedding,
  version: (await client.version()).version, pulled: (await client.pull({ model })).status,
}));
