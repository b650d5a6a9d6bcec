// A conversation by the AI SDK: node ai_sdk.mjs API URL MODEL PROMPT ... writes the answer to each prompt.
import { createOpenAI } from '@ai-sdk/openai';
import { createOpenAICompatible } from '@ai-sdk/openai-compatible';
import { isStepCount, streamText, tool } from 'ai';
import { z } from 'zod';

globalThis.AI_SDK_LOG_WARNINGS = false;
const [api, baseURL, name, ...prompts] = process.argv.slice(2);
const model =
  api === 'chat'
    ? createOpenAICompatible({ name: 'jengine', baseURL, apiKey: 'none' })(name)
    : createOpenAI({ baseURL, apiKey: 'none' }).responses(name);
const look = tool({
  description: 'Looks at a word',
  inputSchema: z.object({ word: z.string() }),
  execute: async () => 'mark-42',
});
const messages = [];
for (const prompt of prompts) {
  messages.push({ role: 'user', content: prompt });
  const failures = [];
  const answer = streamText({
    model,
    messages,
    tools: { look },
    stopWhen: isStepCount(4),
    maxRetries: 0,
    onError: ({ error }) => failures.push(error),
  });
  for await (const text of answer.textStream) process.stdout.write(text);
  process.stdout.write('\n');
  for (const error of failures) {
    console.log('failed:', error.responseBody ?? JSON.stringify(error), error.message);
    process.exit(1);
  }
  messages.push(...(await answer.response).messages);
}
