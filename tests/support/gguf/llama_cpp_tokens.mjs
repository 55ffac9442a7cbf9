// Reads {"modules", "jobs": [[file, texts], ...]} from standard input; writes the ids that llama.cpp gives to the texts of
// each job with the vocabulary of its GGUF file. Special tokens in a text count as such; none are added.
import { readFileSync } from "node:fs";
import { createRequire } from "node:module";
import { pathToFileURL } from "node:url";

const { modules, jobs } = JSON.parse(readFileSync(0, "utf8"));
const entry = createRequire(`${modules}/`).resolve("node-llama-cpp");
const { getLlama, LlamaLogLevel } = await import(pathToFileURL(entry));
const llama = await getLlama({ gpu: false, build: "never", skipDownload: true, logLevel: LlamaLogLevel.error });
const found = [];
for (const [modelPath, texts] of jobs) {
    const model = await llama.loadModel({ modelPath, vocabOnly: true });
    found.push(texts.map((text) => Array.from(model.tokenize(text, true))));
    await model.dispose();
}
process.stdout.write(JSON.stringify(found), () => process.exit(0)); // an earlier exit would cut what a pipe holds
