// Vercel AI SDK, whose default is OpenAI's Responses with its store: three turns of a user, one tool.
import { createAnthropic } from "@ai-sdk/anthropic";
import { createOpenAI } from "@ai-sdk/openai";
import { generateText, jsonSchema, stepCountIs, streamText, tool } from "ai";

const [dialect, way, task] = process.argv.slice(2);
const openai = createOpenAI({ baseURL: process.env.OPENAI_BASE_URL });
const anthropic = createAnthropic({ baseURL: process.env.ANTHROPIC_BASE_URL + "/v1" });
const models = { default: openai, chat: openai.chat, messages: anthropic };
const parameters = { type: "object", properties: { command: { type: "string" } } };
const run_command = tool({
  description: "Run a command.",
  inputSchema: jsonSchema(parameters),
  execute: async ({ command }) => command.replace("echo ", ""),
});
const messages = [];
for (const question of [task, "Again.", "And now?"]) {
  messages.push({ role: "user", content: question });
  const asked = {
    model: models[dialect]("tiny"), messages, tools: { run_command }, stopWhen: stepCountIs(5),
    maxRetries: 0,
  };
  const said = way === "stream" ? streamText(asked) : await generateText(asked);
  messages.push(...(await said.responseMessages));
  console.log(await said.text);
}
