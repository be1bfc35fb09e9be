#!/usr/bin/env node
/** Asks an Octavo server one thing and writes the answer as it comes. */
import { readFileSync } from "node:fs";

import { credentials, Metadata, status, type ServiceError } from "@grpc/grpc-js";

import { parseOptions, type Options } from "./options.js";
import { GenerateRequest, GenerationServiceClient, type Finished } from "./stubs/octavo/v1/generation.js";
import { FinishReason } from "./stubs/octavo/v1/sampling.js";

/** As grpcurl has it: 64 and the status's number, so that scripts can tell. */
const STATUS_OFFSET = 64;
const FAILURE = 1;

/** Asks, and writes the answer to stdout and what it took to stderr. */
async function chat(options: Options): Promise<void> {
  const client = new GenerationServiceClient(options.address, channelCredentials(options.ca));
  const metadata = new Metadata();
  if (options.apiKey) metadata.set("authorization", `Bearer ${options.apiKey}`);
  const deadline = Date.now() + options.deadline * 1000;
  const call = client.generate(request(options), metadata, { deadline });

  let pieces = 0;
  try {
    for await (const { event } of call) {
      if (event?.$case === "delta") {
        process.stdout.write(event.value.text);
        pieces += 1;
        if (pieces === options.cancelAfter) {
          call.cancel();
          process.stderr.write(`\ncancelled after ${pieces} pieces\n`);
          return;
        }
      } else if (event?.$case === "finished") {
        process.stdout.write("\n");
        report(event.value);
      }
    }
  } finally {
    client.close();
  }
}

function channelCredentials(ca: string | undefined) {
  return ca ? credentials.createSsl(readFileSync(ca)) : credentials.createInsecure();
}

function request(options: Options): GenerateRequest {
  return GenerateRequest.fromPartial({
    prompt: {
      $case: "chat",
      value: { messages: [{ role: "user", content: options.message }] },
    },
    sampling: { temperature: 0 }, // greedy: the same answer each time
    stop: { maxTokens: options.maxTokens },
  });
}

function report({ reason, usage }: Finished): void {
  process.stderr.write(
    `${FinishReason[reason]}: ${usage?.promptTokens} prompt tokens (${usage?.cachedTokens} cached), ` +
      `${usage?.outputTokens} output tokens\n`,
  );
}

function isServiceError(error: unknown): error is ServiceError {
  return error instanceof Error && "code" in error && typeof error.code === "number";
}

try {
  await chat(parseOptions());
} catch (error) {
  if (isServiceError(error)) {
    process.stderr.write(`octavo-chat: ${status[error.code]}: ${error.details}\n`);
    process.exitCode = STATUS_OFFSET + error.code;
  } else {
    process.stderr.write(`octavo-chat: ${(error as Error).message}\n`);
    process.exitCode = FAILURE;
  }
}
