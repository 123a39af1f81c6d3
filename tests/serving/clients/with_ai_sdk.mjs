// Vercel's AI SDK with schemas of zod 4: text, objects and tools, whole and streamed, by the provider of OpenAI-compatible
// servers, by OpenAI's own (chat and the Responses API) and by Anthropic's. Runs in the folder where the packages are installed.
import assert from "node:assert/strict";

import { createAnthropic } from "@ai-sdk/anthropic";
import { createOpenAI } from "@ai-sdk/openai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateObject, generateText, isStepCount, Output, streamObject, streamText, tool } from "ai";
import { z } from "zod";

const [url, model] = process.argv.slice(2);

const prompt = "import os";
const person = z.object({
  name: z.string().max(8),
  email: z.email(),
  id: z.uuid(),
  born: z.iso.date(),
  mood: z.enum(["fine", "tired"]),
  sign: z.emoji().max(4),
  tags: z.array(z.string().max(4)).max(2),
  note: z.string().max(4).nullable(),
});
const weather = tool({
  description: "The weather of a city",
  inputSchema: z.object({ city: z.string().max(8), day: z.iso.date(), unit: z.enum(["C", "F"]) }),
  execute: async ({ city }) => `sunny in ${city}`,
});

const server = { baseURL: `${url}/v1`, apiKey: "none" };
const providers = {
  "openai-compatible": createOpenAICompatible({ ...server, name: "aerie", supportsStructuredOutputs: true, includeUsage: true })(model),
  "openai, chat": createOpenAI(server).chat(model),
  "openai, responses": createOpenAI(server).responses(model),
  anthropic: createAnthropic(server)(model),
};
for (const [kind, languageModel] of Object.entries(providers)) {
  const short = { model: languageModel, prompt, temperature: 0, maxOutputTokens: 24, maxRetries: 0 };
  const whole = await generateText(short);
  assert(whole.text && whole.usage.outputTokens > 0, kind);
  const stream = streamText(short);
  let text = "";
  for await (const part of stream.textStream) text += part;
  assert.equal(text, whole.text, kind);
  assert((await stream.usage).outputTokens > 0, kind);

  const long = { model: languageModel, prompt, temperature: 0, maxOutputTokens: 800, maxRetries: 0 };
  const { object } = await generateObject({ ...long, schema: person });
  person.parse(object);
  const { output } = await generateText({ ...long, output: Output.object({ schema: person }) });
  person.parse(output);
  const objects = streamObject({ ...long, schema: person });
  for await (const partial of objects.partialObjectStream) assert.equal(typeof partial, "object", kind);
  person.parse(await objects.object);

  const { output: chosen } = await generateText({ ...long, output: Output.choice({ options: ["fine", "tired"] }) });
  assert(["fine", "tired"].includes(chosen), kind);

  const named = { type: "tool", toolName: "weather" };
  const called = await generateText({ ...long, tools: { weather }, toolChoice: named });
  assert.equal(called.toolCalls.length, 1, kind);
  assert.equal(called.toolResults[0].output, `sunny in ${called.toolCalls[0].input.city}`, kind);
  const calls = streamText({ ...long, tools: { weather }, toolChoice: named });
  const parts = [];
  for await (const part of calls.fullStream) parts.push(part.type);
  assert.equal((await calls.toolCalls).length, 1, `${kind} ${parts}`);

  // A second step takes the call and its result back to the server.
  const stepped = await generateText({
    ...long,
    tools: { weather },
    stopWhen: isStepCount(2),
    prepareStep: ({ stepNumber }) => (stepNumber ? { toolChoice: "none", maxOutputTokens: 8 } : { toolChoice: named }),
  });
  assert.equal(stepped.steps.length, 2, kind);
  console.log(`${kind}: text, objects, a tool by name, two steps; whole and streamed`);
}
