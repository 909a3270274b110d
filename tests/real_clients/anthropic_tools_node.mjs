// Anthropic's client for Node: a tool, streamed.
import { readFileSync } from "node:fs";
import Anthropic from "@anthropic-ai/sdk";

const [url, model] = process.argv.slice(2);
const asked = JSON.parse(readFileSync(new URL("questions.json", import.meta.url)));
const client = new Anthropic({ baseURL: url, apiKey: "none" });
const tools = [{ name: asked.tool.name, description: "Adds.", input_schema: asked.tool.parameters }];
const settings = { model, max_tokens: 500, tools };
const messages = [{ role: "user", content: asked.sum }];
const first = await client.messages.stream({ messages, ...settings }).finalMessage();
const call = first.content.find((block) => block.type === "tool_use");
const content = String(call.input.a + call.input.b);
messages.push(
  { role: "assistant", content: first.content },
  { role: "user", content: [{ type: "tool_result", tool_use_id: call.id, content }] },
);
const last = await client.messages.create({ messages, ...settings });
console.log(JSON.stringify({ sum: last.content[0].text }));
