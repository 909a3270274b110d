// OpenAI's client for Node.
import { readFileSync } from "node:fs";
import OpenAI from "openai";

const [url, model] = process.argv.slice(2);
const asked = JSON.parse(readFileSync(new URL("questions.json", import.meta.url)));
const client = new OpenAI({ baseURL: `${url}/v1`, apiKey: "none" });
const settings = { model, temperature: 0, max_tokens: asked.max_tokens };
const messages = [
  { role: "system", content: asked.system },
  { role: "user", content: asked.first },
];
const first = await client.chat.completions.create({ messages, ...settings });
messages.push(first.choices[0].message, { role: "user", content: asked.second });
const second = await client.chat.completions.create({ messages, ...settings });
const stream = client.chat.completions.stream({ messages, ...settings });
const final = await stream.finalContent();
const whole = await client.completions.create({ prompt: asked.prompt, ...settings });
let parts = "";
for await (const part of await client.completions.create({ prompt: asked.prompt, stream: true, ...settings })) {
  parts += part.choices[0].text;
}
console.log(
  JSON.stringify({
    first: first.choices[0].message.content,
    second: second.choices[0].message.content,
    second_stream: final,
    prompt: whole.choices[0].text,
    prompt_stream: parts,
  }),
);
