// Vercel AI SDK with its default model, OpenAI's Responses: three turns of a user, one tool.
import { createOpenAI } from "@ai-sdk/openai";
import { generateText, jsonSchema, stepCountIs, tool } from "ai";

const task = process.argv[2];
const openai = createOpenAI({ baseURL: process.env.OPENAI_BASE_URL });
const parameters = { type: "object", properties: { command: { type: "string" } } };
const run_command = tool({
  description: "Run a command.",
  inputSchema: jsonSchema(parameters),
  execute: async ({ command }) => command.replace("echo ", ""),
});
const messages = [];
for (const question of [task, "Again.", "And now?"]) {
  messages.push({ role: "user", content: question });
  const said = await generateText({
    model: openai("tiny"), messages, tools: { run_command }, stopWhen: stepCountIs(5), maxRetries: 0,
  });
  messages.push(...said.responseMessages);
  console.log(said.text);
}
