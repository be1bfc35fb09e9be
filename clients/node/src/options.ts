/** What octavo-chat is asked to do, read from the command line. */
import { parseArgs } from "node:util";

const USAGE = `usage: octavo-chat [OPTION]... MESSAGE

Asks an Octavo server one thing and writes the answer as it comes.

  --address HOST:PORT  the server; default $OCTAVO_ADDRESS, or localhost:50051
  --api-key KEY        says who asks; default $OCTAVO_API_KEY, or nobody
  --ca FILE            TLS, the server's authority in PEM; default $OCTAVO_CA, or no TLS
  --deadline SECONDS   give up after this long; default 60
  --max-tokens N       most tokens of the answer; default 512
  --cancel-after N     cancel the call after N pieces of text
`;
const WRONG_USAGE = 2;

export interface Options {
  message: string;
  address: string;
  apiKey?: string;
  ca?: string;
  /** Seconds. */
  deadline: number;
  maxTokens: number;
  /** Pieces of text; undefined: never. */
  cancelAfter?: number;
}

/**
 * Reads the command line, and the environment where it is silent. Ends the
 * program with 2 where it is wrong, and with 0 after --help.
 */
export function parseOptions(): Options {
  try {
    const { values, positionals } = parseArgs({
      allowPositionals: true,
      options: {
        address: { type: "string", default: process.env.OCTAVO_ADDRESS || "localhost:50051" },
        "api-key": { type: "string", default: process.env.OCTAVO_API_KEY },
        ca: { type: "string", default: process.env.OCTAVO_CA },
        deadline: { type: "string", default: "60" },
        "max-tokens": { type: "string", default: "512" },
        "cancel-after": { type: "string" },
        help: { type: "boolean" },
      },
    });
    if (values.help) {
      process.stdout.write(USAGE);
      process.exit(0);
    }
    const [message, ...more] = positionals;
    if (message === undefined || more.length > 0) throw new Error("exactly one MESSAGE is needed");
    const cancelAfter = values["cancel-after"];
    return {
      message,
      address: values.address,
      apiKey: values["api-key"],
      ca: values.ca,
      deadline: positive("--deadline", values.deadline),
      maxTokens: whole("--max-tokens", values["max-tokens"]),
      cancelAfter: cancelAfter === undefined ? undefined : whole("--cancel-after", cancelAfter),
    };
  } catch (error) {
    process.stderr.write(`octavo-chat: ${(error as Error).message}\n\n${USAGE}`);
    process.exit(WRONG_USAGE);
  }
}

function positive(option: string, text: string): number {
  const number = Number(text);
  if (!(number > 0 && number < Infinity)) {
    throw new Error(`${option} takes a number above 0, not '${text}'`);
  }
  return number;
}

function whole(option: string, text: string): number {
  const number = positive(option, text);
  if (!Number.isInteger(number)) throw new Error(`${option} takes a whole number, not '${text}'`);
  return number;
}
