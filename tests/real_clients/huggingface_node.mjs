// Hugging Face's client for JavaScript.
import { readFileSync } from "node:fs";
import { InferenceClient } from "@huggingface/inference";

const [url] = process.argv.slice(2);
const asked = JSON.parse(readFileSync(new URL("questions.json", import.meta.url)));
const client = new InferenceClient(undefined, { endpointUrl: url });
const settings = { temperature: 0, max_tokens: asked.max_tokens };
const messages = [
  { role: "system", content: asked.system },
  { role: "user", content: asked.first },
];
const first = await client.chatCompletion({ messages, ...settings });
messages.push(first.choices[0].message, { role: "user", content: asked.second });
const second = await client.chatCompletion({ messages, ...settings });
let chat = "";
for await (const part of client.chatCompletionStream({ messages, ...settings })) {
  chat += part.choices[0]?.delta?.content ?? "";
}
const parameters = { max_new_tokens: asked.max_tokens };
const whole = await client.textGeneration({ inputs: asked.prompt, parameters });
const endpoint = await client.endpoint(url).textGeneration({ inputs: asked.prompt, parameters });
let parts = "";
// Of an endpoint the stream is that of completions, whatever its type says: without a temperature it is sampled.
const greedy = { ...parameters, temperature: 0 };
for await (const part of client.textGenerationStream({ inputs: asked.prompt, parameters: greedy })) {
  parts += part.choices[0].text;
}
console.log(
  JSON.stringify({
    first: first.choices[0].message.content,
    second: second.choices[0].message.content,
    second_stream: chat,
    prompt: whole.generated_text,
    prompt_endpoint: endpoint.generated_text,
    prompt_stream: parts,
  }),
);
