// Anthropic's client for Node.
import assert from "node:assert";
import { readFileSync } from "node:fs";
import Anthropic from "@anthropic-ai/sdk";

const [url, model] = process.argv.slice(2);
const asked = JSON.parse(readFileSync(new URL("questions.json", import.meta.url)));
const client = new Anthropic({ baseURL: url, apiKey: "none" });
const settings = { model, system: asked.system, temperature: 0, max_tokens: asked.max_tokens };
const messages = [{ role: "user", content: asked.first }];
const first = await client.messages.create({ messages, ...settings });
const count = await client.messages.countTokens({ messages, model, system: asked.system });
assert.equal(count.input_tokens, first.usage.input_tokens + first.usage.cache_read_input_tokens);
messages.push({ role: "assistant", content: first.content }, { role: "user", content: asked.second });
const second = await client.messages.create({ messages, ...settings });
const final = await client.messages.stream({ messages, ...settings }).finalMessage();
assert.equal(final.stop_reason, second.stop_reason);
console.log(
  JSON.stringify({ first: first.content[0].text, second: second.content[0].text, second_stream: final.content[0].text }),
);
