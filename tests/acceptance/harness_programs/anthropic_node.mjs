// Anthropic's SDK for Node.js, streamed by its helper: tool uses in a loop.
import Anthropic from "@anthropic-ai/sdk";

const client = new Anthropic({ maxRetries: 0 });
const input_schema = { type: "object", properties: { command: { type: "string" } } };
const tools = [{ name: "run_command", description: "Run a command.", input_schema }];
const messages = [{ role: "user", content: process.argv[2] }];
for (;;) {
  const stream = client.messages.stream({ model: "tiny", max_tokens: 500, messages, tools });
  const { content } = await stream.finalMessage();
  messages.push({ role: "assistant", content });
  const uses = content.filter((block) => block.type === "tool_use");
  if (!uses.length) {
    console.log(content.map((block) => block.text ?? "").join(""));
    break;
  }
  const results = uses.map(({ id }) => ({ type: "tool_result", tool_use_id: id, content: "seventeen" }));
  messages.push({ role: "user", content: results });
}
