// OpenAI's SDK for Node.js over chat or Responses, streamed by its helper: calls in a loop.
import OpenAI from "openai";

const client = new OpenAI({ maxRetries: 0 });
const parameters = { type: "object", properties: { command: { type: "string" } } };
const run_command = { name: "run_command", description: "Run a command.", parameters };

async function chat(messages) {
  const tools = [{ type: "function", function: run_command }];
  for (;;) {
    const stream = client.chat.completions.stream({ model: "tiny", messages, tools });
    const message = await stream.finalMessage();
    messages.push(message);
    if (!message.tool_calls?.length) return message.content;
    for (const one of message.tool_calls) {
      messages.push({ role: "tool", tool_call_id: one.id, content: "seventeen" });
    }
  }
}

async function respond(input) {
  const tools = [{ type: "function", strict: false, ...run_command }];
  for (;;) {
    const stream = client.responses.stream({ model: "tiny", input, tools });
    const { output, output_text } = await stream.finalResponse();
    const calls = output.filter((item) => item.type === "function_call");
    if (!calls.length) return output_text;
    const results = calls.map(({ call_id }) => (
      { type: "function_call_output", call_id, output: "seventeen" }
    ));
    input.push(...output, ...results);
  }
}

const [dialect, content] = process.argv.slice(2);
const ask = { chat, responses: respond }[dialect];
console.log(await ask([{ role: "user", content }]));
