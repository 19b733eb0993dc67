/**
 * Envelopes: 64 bytes of signature over "crowdml/envelope/1" and the envelope, then the envelope itself.
 * Sign once, keep the bytes, and send exactly those. Mirrors src/crowdml/wire/envelopes.py.
 *
 * @typedef {import("./bytes.js").Bytes} Bytes
 * @typedef {import("./codec.js").Plain} Plain
 * @typedef {import("./keys.js").Key} Key
 * @typedef {import("./statements.js").Statement} Statement
 * @typedef {object} Envelope
 * @property {Bytes} task 32 bytes
 * @property {string} sender
 * @property {readonly string[]} to sorted, each once
 * @property {number | bigint} seq
 * @property {string} kind
 * @property {Bytes} body
 * @property {Statement} statement
 *
 * @typedef {Envelope & { readonly data: Bytes }} Signed as it arrived: nobody has verified it but by `verifyEnvelope`
 */

import { concat, sha256, toUtf8 } from "./bytes.js";
import { asBytes, asInteger, asList, asMap, asText, decode, encode } from "./codec.js";
import { deviceId, sign, SIGNATURE_SIZE, verify } from "./keys.js";
import { malformed, Problem } from "./problems.js";
import { readStatement } from "./statements.js";

export const SERVER = "server";
const PREFIX = toUtf8("crowdml/envelope/1");
const LARGEST_BODY = 16 * 2 ** 20;
const LARGEST_ENVELOPE = 16_826_968;
const MOST_RECIPIENTS = 1024;
const KEYS = ["body", "kind", "sender", "seq", "statement", "task", "to"];
const KIND = /^[a-z][a-z0-9_]*(?:\/[a-z0-9_]+)*\/[1-9][0-9]*$/;
const ID = /^[0-9a-f]{32}$/;
const ADDRESS = /^(?:server|[0-9a-f]{32}|@(?:0|[1-9][0-9]{0,5}))$/;

/** The bytes that are signed, less their prefix. @param {Envelope} envelope @returns {Bytes} */
export function packEnvelope({ body, kind, sender, seq, statement, task, to }) {
  const { dearest, device, samples } = statement;
  return encode({ body, kind, sender, seq, statement: { dearest, device, samples }, task, to: to.toSorted() });
}

/** The bytes to send. They are the message: send them as they are until they are acknowledged.
 * @param {Envelope} envelope @param {Key} key @returns {Promise<Bytes>} */
export async function signEnvelope(envelope, key) {
  if (envelope.sender !== key.id) throw new Error(`The envelope is from ${envelope.sender}, and the key of ${key.id}.`);
  const packed = packEnvelope(envelope);
  const data = concat(await sign(key, concat(PREFIX, packed)), packed);
  openEnvelope(data); // what nobody would read must not be charged and sent
  return data;
}

/** What the bytes say, if their structure is right. @param {Uint8Array} data @returns {Signed} */
export function openEnvelope(data) {
  if (data.length > LARGEST_ENVELOPE) throw new Problem("too-large", `The envelope has ${data.length} bytes.`);
  if (data.length <= SIGNATURE_SIZE) malformed(`A signed envelope has more than ${SIGNATURE_SIZE} bytes.`);
  const found = asMap(decode(data.subarray(SIGNATURE_SIZE)), KEYS, "The envelope");
  return {
    body: asBytes(found.body, "body", { most: LARGEST_BODY }),
    kind: matching(found.kind, KIND, 64, "kind"),
    sender: matching(found.sender, ID, 32, "sender"),
    seq: asInteger(found.seq, "seq", 1, 2n ** 63n - 1n),
    statement: readStatement(found.statement),
    task: asBytes(found.task, "task", { size: 32 }),
    to: readRecipients(found.to),
    data: new Uint8Array(data),
  };
}

/** Whether the sender's key is this one, and signed these bytes. @param {Signed} signed @param {Bytes} publicKey */
export async function verifyEnvelope(signed, publicKey) {
  if (publicKey.length !== 32 || (await deviceId(publicKey)) !== signed.sender) return false;
  const [signature, packed] = [signed.data.slice(0, SIGNATURE_SIZE), signed.data.slice(SIGNATURE_SIZE)];
  return verify(publicKey, signature, concat(PREFIX, packed));
}

/** SHA-256 of all bytes: in the receipt and in the journal's chain. @param {Bytes} data */
export function hashEnvelope(data) {
  return sha256(data);
}

/** @param {Plain} value @param {RegExp} pattern @param {number} most @param {string} what */
function matching(value, pattern, most, what) {
  const text = asText(value, what, most);
  return pattern.test(text) ? text : malformed(`${what} does not read as it must.`);
}

/** @param {Plain} value @returns {string[]} */
function readRecipients(value) {
  const to = asList(value, "to", MOST_RECIPIENTS).map((each) => matching(each, ADDRESS, 32, "an address in `to`"));
  if (!to.length) malformed("`to` names nobody.");
  if (to.some((each, at) => at > 0 && each <= to[at - 1])) malformed("`to` must be sorted, each once.");
  return to;
}
