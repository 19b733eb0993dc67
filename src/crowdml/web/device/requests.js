/**
 * Requests: the signed Authorization header, enrolment, and the link to the owner's page. The clock is an argument.
 * Mirrors src/crowdml/wire/requests.py.
 *
 * @typedef {import("./bytes.js").Bytes} Bytes
 * @typedef {import("./keys.js").Key} Key
 * @typedef {{ readonly device: string, readonly serverKey: Bytes, readonly tasks: readonly string[] }} Enrolled
 */

import { concat, sha256, toBase64url, toHex, toUtf8 } from "./bytes.js";
import { asBytes, asList, asMap, asText, decode, encode } from "./codec.js";
import { isSound, PUBLIC_SIZE, sign } from "./keys.js";
import { malformed } from "./problems.js";

const ENROL_PREFIX = toUtf8("crowdml/enrol/1");
const MOST_TASKS = 64;
const LONGEST_LINK = 900;

/** The value of the Authorization header. `target` is the path with its query, as in the request line.
 * @param {Key} key @param {string} method @param {string} target @param {Bytes} body @param {number} seconds Unix
 * time */
export async function authorize(key, method, target, body, seconds) {
  const digest = toHex(await sha256(body));
  const lines = ["crowdml/request/1", method.toUpperCase(), target, Math.floor(seconds), digest];
  return `Crowdml ${key.id} ${Math.floor(seconds)} ${toBase64url(await sign(key, toUtf8(lines.join("\n"))))}`;
}

/** The body of POST /v1/devices, and its Crowdml-Signature header. @param {Key} key @param {string} code
 * @param {readonly string[]} [tasks] hashes in hex; none: every task that the invitation admits to */
export async function enrol(key, code, tasks = []) {
  if (!/^[A-Za-z0-9_-]{1,128}$/.test(code)) malformed("An invitation's code is made of letters, digits, '-' and '_'.");
  const named = { code, key: key.public };
  const body = encode(tasks.length ? { ...named, tasks: tasks.toSorted() } : named);
  return { body, signature: toBase64url(await sign(key, concat(ENROL_PREFIX, await sha256(body)))) };
}

/** The server's answer to an enrolment. @param {Uint8Array} data @returns {Enrolled} */
export function openEnrolled(data) {
  const found = asMap(decode(data), ["device", "server_key", "tasks"], "The answer to the enrolment");
  const device = asText(found.device, "device", 32);
  const serverKey = asBytes(found.server_key, "server_key", { size: PUBLIC_SIZE });
  const tasks = asList(found.tasks, "tasks", MOST_TASKS).map((task) => asText(task, "a task", 64));
  if (!/^[0-9a-f]{32}$/.test(device)) malformed("device is not a device id.");
  if (!isSound(serverKey)) malformed("The server's key is of small order or not in its one encoding.");
  if (!tasks.every((task) => /^[0-9a-f]{64}$/.test(task))) malformed("A task is 64 hex digits.");
  if (tasks.some((task, at) => at > 0 && task <= tasks[at - 1])) malformed("tasks must be sorted, each once.");
  return { device, serverKey, tasks };
}

/** The query of a link to the owner's page that holds from `at` for `lasts` seconds. Whoever has it is taken for the
 * owner: show it to nobody else. @param {Key} key @param {number} at Unix time @param {number} [lasts] */
export async function ownerLink(key, at, lasts = LONGEST_LINK) {
  if (lasts < 1 || lasts > LONGEST_LINK || at < 0) {
    throw new RangeError(`A link holds for 1 to ${LONGEST_LINK} seconds.`);
  }
  const signed = toUtf8(["crowdml/owner/1", key.id, at, lasts].join("\n"));
  return `at=${at}&for=${lasts}&signature=${toBase64url(await sign(key, signed))}`;
}
