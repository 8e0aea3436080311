// OpenAI's client for Node against the server at TOKENROUTER_URL, and with a key at TOKENROUTER_GUARDED_URL.

import assert from "node:assert/strict";
import { test } from "node:test";
import OpenAI from "openai";

const client = new OpenAI({ baseURL: `${process.env.TOKENROUTER_URL}/v1`, apiKey: "none", maxRetries: 0 });
const ask = {
  model: "rstitch",
  messages: [{ role: "user", content: "What is 47 * 83?" }],
  max_tokens: 48,
  temperature: 0,
};
const whole = await client.chat.completions.create(ask);
const text = whole.choices[0].message.content;

test("an answer", () => {
  assert.ok(text.length > 0);
  assert.equal(whole.choices[0].finish_reason, "stop");
  assert.equal(whole.usage.total_tokens, whole.usage.prompt_tokens + whole.usage.completion_tokens);
  assert.ok(whole._request_id);
});

test("models", async () => {
  const ids = [];
  for await (const model of client.models.list()) ids.push(model.id);
  assert.ok(ids.includes("rstitch") && ids.includes("small"));
  assert.equal((await client.models.retrieve("rstitch")).id, "rstitch");
});

test("a stream", async () => {
  const options = { stream: true, stream_options: { include_usage: true } };
  const stream = await client.chat.completions.create({ ...ask, ...options });
  let streamed = "";
  let usage;
  for await (const chunk of stream) {
    streamed += chunk.choices[0]?.delta?.content ?? "";
    usage = chunk.usage ?? usage;
  }
  assert.equal(streamed, text);
  assert.deepEqual([usage.prompt_tokens, usage.completion_tokens], [
    whole.usage.prompt_tokens,
    whole.usage.completion_tokens,
  ]);
});

test("the helper for streams", async () => {
  const deltas = [];
  const stream = client.chat.completions.stream({ ...ask }).on("content", (delta) => deltas.push(delta));
  assert.equal(await stream.finalContent(), text);
  assert.equal(deltas.join(""), text);
  assert.equal((await stream.finalChatCompletion()).choices[0].finish_reason, "stop");
});

test("a stream that is broken off", async () => {
  const stream = await client.chat.completions.create({ ...ask, stream: true });
  for await (const chunk of stream) {
    assert.equal(chunk.choices[0].delta.role, "assistant");
    stream.controller.abort();
    break;
  }
  assert.equal((await client.chat.completions.create(ask)).choices[0].message.content, text);
});

test("completions", async () => {
  const fields = { model: "small", prompt: "The total is", max_tokens: 8, temperature: 0 };
  const one = await client.completions.create(fields);
  let streamed = "";
  for await (const chunk of await client.completions.create({ ...fields, stream: true })) {
    streamed += chunk.choices[0].text;
  }
  assert.equal(streamed, one.choices[0].text);
});

test("raw responses", async () => {
  const { data, response } = await client.chat.completions
    .create(ask, { headers: { "x-request-id": "mine" } })
    .withResponse();
  assert.equal(response.headers.get("x-request-id"), "mine");
  assert.equal(data.choices[0].message.content, text);
});

test("errors have their classes", async () => {
  const long = [{ role: "user", content: "word ".repeat(5000) }];
  const cases = [
    [{ model: "none" }, OpenAI.NotFoundError, "model_not_found"],
    [{ top_p: 2 }, OpenAI.BadRequestError, "invalid_value"],
    [{ messages: long }, OpenAI.BadRequestError, "context_length_exceeded"],
  ];
  for (const [fields, kind, code] of cases) {
    for (const stream of [false, true]) {
      await assert.rejects(client.chat.completions.create({ ...ask, ...fields, stream }), (error) => {
        assert.ok(error instanceof kind, `${error}`);
        assert.equal(error.code, code);
        return true;
      });
    }
  }
});

test("a wrong key", async () => {
  const stranger = new OpenAI({ baseURL: `${process.env.TOKENROUTER_GUARDED_URL}/v1`, apiKey: "wrong", maxRetries: 0 });
  await assert.rejects(stranger.chat.completions.create(ask), OpenAI.AuthenticationError);
});

test("a schema", async () => {
  const schema = {
    type: "object",
    properties: { answer: { type: "integer" }, sure: { type: "boolean" } },
    required: ["answer", "sure"],
    additionalProperties: false,
  };
  const answer = await client.chat.completions.parse({
    ...ask,
    max_tokens: 400,
    response_format: { type: "json_schema", json_schema: { name: "answer", schema, strict: true } },
  });
  const parsed = JSON.parse(answer.choices[0].message.content);
  assert.ok(Number.isInteger(parsed.answer));
  assert.equal(typeof parsed.sure, "boolean");
});
