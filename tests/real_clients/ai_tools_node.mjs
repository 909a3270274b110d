// Vercel's AI SDK with a tool, whole and streamed.
import { readFileSync } from "node:fs";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateText, jsonSchema, stepCountIs, streamText, tool } from "ai";

const [url, name] = process.argv.slice(2);
const asked = JSON.parse(readFileSync(new URL("questions.json", import.meta.url)));
const provider = createOpenAICompatible({ name: "djl", baseURL: `${url}/v1` });
const inputSchema = jsonSchema(asked.tool.parameters);
const add = tool({ description: "Adds.", inputSchema, execute: async ({ a, b }) => a + b });
const settings = { model: provider.chatModel(name), prompt: asked.sum, maxOutputTokens: 500 };
const chat = { ...settings, tools: { [asked.tool.name]: add }, stopWhen: stepCountIs(3) };
const whole = await generateText(chat);
const stream = streamText(chat);
console.log(JSON.stringify({ sum: whole.text, sum_stream: await stream.text }));
