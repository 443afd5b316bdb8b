// What OpenAI's client of npm gets from a door that serves the alphabet; one line of JSON tells it all.
//   node client.mjs <folder of node_modules> <address of the door> <id of the end token>
import { createRequire } from "node:module";
const require = createRequire(process.argv[2] + "/");
const OpenAI = require("openai");
const [url, end] = process.argv.slice(3);
const client = new OpenAI({ baseURL: url, apiKey: "none", maxRetries: 0 });
const messages = [{ role: "user", content: "Say the alphabet." }];
const greedy = { model: "m", temperature: 0 };
const schema = { type: "object", required: ["b"], additionalProperties: false, properties: { b: { const: "c" } } };
const told = {};

const whole = await client.chat.completions.create({ messages, ...greedy });
told.whole = [whole.choices[0].message.content, whole.choices[0].finish_reason, whole.usage.completion_tokens];

const pieces = [];
let usage = null;
for await (const chunk of await client.chat.completions.create({
  messages, stream: true, stream_options: { include_usage: true }, stop: "n", ...greedy,
})) {
  pieces.push(chunk.choices[0]?.delta.content ?? "");
  usage = chunk.usage ?? usage;
}
told.stream = [pieces.join(""), pieces.length > 3, usage.total_tokens > usage.completion_tokens];

const drawn = { model: "m", prompt: "x", n: 3, max_tokens: 8, temperature: 5, seed: 7, logprobs: 1 };
const [one, same] = [await client.completions.create(drawn), await client.completions.create(drawn)];
const texts = (answer) => answer.choices.map((choice) => choice.text);
told.samples = [new Set(texts(one)).size > 1, JSON.stringify(texts(one)) === JSON.stringify(texts(same))];
told.logprobs = one.choices[0].logprobs.token_logprobs.length;
const scored = await client.chat.completions.create({ messages, logprobs: true, top_logprobs: 2, max_tokens: 4, ...greedy });
told.chatLogprobs = scored.choices[0].logprobs.content.map((entry) => entry.token);

const tool = { type: "function", function: { name: "a", description: "Says one letter.", parameters: schema } };
const called = { messages, tools: [tool], tool_choice: "required", ...greedy };
const call = (await client.chat.completions.create(called)).choices[0];
told.tool = [call.finish_reason, call.message.tool_calls[0].function.name, JSON.parse(call.message.tool_calls[0].function.arguments)];
const streamed = await client.chat.completions.stream(called).finalChatCompletion();
told.streamedTool = JSON.parse(streamed.choices[0].message.tool_calls[0].function.arguments);

const response_format = { type: "json_schema", json_schema: { name: "x", schema } };
told.json = JSON.parse((await client.chat.completions.create({ messages, response_format, ...greedy })).choices[0].message.content);

told.models = (await client.models.list()).data.map((model) => model.id);

told.errors = [];
for (const wrong of [{ model: "zz" }, { what: 1 }, { prompt: "x".repeat(9000) }, { temperature: -1 }]) {
  try {
    await client.completions.create({ model: "m", prompt: "x", ...wrong });
  } catch (error) {
    told.errors.push([error.constructor.name, error.status, error.code, error.param]);
  }
}

const long = { prompt: "x", max_tokens: 400, stream: true, logit_bias: { [end]: -100 }, ...greedy };
const left = await client.completions.create(long);
for await (const _ of left) break; // which closes the connection
const controller = new AbortController();
const aborted = await client.completions.create(long, { signal: controller.signal });
told.aborted = 0;
for await (const _ of aborted) {
  told.aborted += 1;
  controller.abort();
}

// The door lets one request wait; the client comes again after a 429.
const patient = new OpenAI({ baseURL: url, apiKey: "none", maxRetries: 20 });
const all = await Promise.all([...Array(6)].map(() => patient.chat.completions.create({ messages, ...greedy })));
told.retried = all.map((answer) => answer.choices[0].message.content);

console.log(JSON.stringify(told));
