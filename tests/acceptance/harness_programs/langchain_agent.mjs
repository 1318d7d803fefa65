// LangChain for JavaScript, whose agent puts a name on the replies that it hands back.
import { ChatOpenAI } from "@langchain/openai";
import { createAgent, tool } from "langchain";
import { z } from "zod";

const [dialect, task] = process.argv.slice(2);
const model = new ChatOpenAI({
  model: "tiny", useResponsesApi: dialect === "responses", maxRetries: 0,
  configuration: { baseURL: process.env.OPENAI_BASE_URL },
});
const run_command = tool(async ({ command }) => command.replace("echo ", ""), {
  name: "run_command", description: "Run a command.", schema: z.object({ command: z.string() }),
});
const agent = createAgent({ model, tools: [run_command] });
const answer = await agent.invoke({ messages: [{ role: "user", content: task }] });
console.log(answer.messages.at(-1).text);
