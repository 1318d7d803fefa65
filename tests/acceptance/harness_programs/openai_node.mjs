// OpenAI's SDK for Node.js over chat, streamed by its helper: calls in a loop.
import OpenAI from "openai";

const client = new OpenAI({ maxRetries: 0 });
const parameters = { type: "object", properties: { command: { type: "string" } } };
const run_command = { name: "run_command", description: "Run a command.", parameters };
const tools = [{ type: "function", function: run_command }];
const messages = [{ role: "user", content: process.argv[2] }];
for (;;) {
  const stream = client.chat.completions.stream({ model: "tiny", messages, tools });
  const message = await stream.finalMessage();
  messages.push(message);
  if (!message.tool_calls?.length) {
    console.log(message.content);
    break;
  }
  for (const one of message.tool_calls) {
    messages.push({ role: "tool", tool_call_id: one.id, content: "seventeen" });
  }
}
