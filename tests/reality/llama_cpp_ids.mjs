// Token ids by llama.cpp. Run as `node llama_cpp_ids.mjs JOBS.json IDS.json`: a list of [model file, list of texts] in,
// a list of lists of ids out. Special tokens in a text count as such; none are added.
import {getLlama, LlamaLogLevel} from "node-llama-cpp";
import fs from "fs";

const llama = await getLlama({gpu: false, build: "never", skipDownload: true, logLevel: LlamaLogLevel.error});
const found = [];
for (const [modelPath, texts] of JSON.parse(fs.readFileSync(process.argv[2], "utf8"))) {
    const model = await llama.loadModel({modelPath, vocabOnly: true});
    found.push(texts.map((text) => Array.from(model.tokenize(text, true))));
    await model.dispose();
}
fs.writeFileSync(process.argv[3], JSON.stringify(found));
process.exit(0);
