// Google's SDK for Node.js: function calls in a loop.
import { GoogleGenAI } from "@google/genai";

const httpOptions = { baseUrl: process.env.ANTHROPIC_BASE_URL }; // without a version
const client = new GoogleGenAI({ apiKey: process.env.OPENAI_API_KEY, httpOptions });
const parametersJsonSchema = { type: "object", properties: { command: { type: "string" } } };
const run_command = { name: "run_command", description: "Run a command.", parametersJsonSchema };
const config = { tools: [{ functionDeclarations: [run_command] }] };
const contents = [{ role: "user", parts: [{ text: process.argv[2] }] }];
for (;;) {
  const said = await client.models.generateContent({ model: "tiny", contents, config });
  contents.push(said.candidates[0].content);
  if (!said.functionCalls?.length) {
    console.log(said.text);
    break;
  }
  const response = { output: "seventeen" };
  const parts = said.functionCalls.map(({ id, name }) => ({ functionResponse: { id, name, response } }));
  contents.push({ role: "user", parts });
}
