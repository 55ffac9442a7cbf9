// Reads {"modules", "texts"} from standard input; writes the token ids that llama.cpp gives with the vocabulary of a
// GGUF file.
import { readFileSync } from "node:fs";
import { createRequire } from "node:module";
import { pathToFileURL } from "node:url";

const { modules, texts } = JSON.parse(readFileSync(0, "utf8"));
const entry = createRequire(`${modules}/`).resolve("node-llama-cpp");
const { getLlama, LlamaLogLevel } = await import(pathToFileURL(entry));
const llama = await getLlama({ gpu: false, build: "never", skipDownload: true, logLevel: LlamaLogLevel.error });
const model = await llama.loadModel({ modelPath: process.argv[2], vocabOnly: true });
console.log(JSON.stringify(texts.map((text) => Array.from(model.tokenize(text, true)))));
process.exit(0);
