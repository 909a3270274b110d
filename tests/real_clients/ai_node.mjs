// Vercel's AI SDK with its provider for servers such as this one.
import { readFileSync } from "node:fs";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateText, streamText } from "ai";

const [url, name] = process.argv.slice(2);
const asked = JSON.parse(readFileSync(new URL("questions.json", import.meta.url)));
const provider = createOpenAICompatible({ name: "djl", baseURL: `${url}/v1`, includeUsage: true });
const settings = { temperature: 0, maxOutputTokens: asked.max_tokens };
const chat = { model: provider.chatModel(name), system: asked.system, ...settings };
const messages = [{ role: "user", content: asked.first }];
const first = await generateText({ messages, ...chat });
messages.push(...first.response.messages, { role: "user", content: asked.second });
const second = await generateText({ messages, ...chat });
const stream = streamText({ messages, ...chat });
const model = provider.completionModel(name);
const completion = await generateText({ model, prompt: asked.prompt, ...settings });
console.log(
  JSON.stringify({
    first: first.text,
    second: second.text,
    second_stream: await stream.text,
    ai: completion.text,
  }),
);
